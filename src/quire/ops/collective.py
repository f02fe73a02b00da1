"""Products of workers that have a part of the inputs each.

The exchange between them is done by a group of workers (distributed/worker_group.py); what is
computed before and after it are ops like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.linear import Plain
from quire.ops.registry import op
from quire.ops.rounding import peaks_of
from quire.ops.segments import Addend, add_up, with_addend


@op(axes={"x": 0}, is_invariant=True)
def row_peaks(x: Tensor) -> Tensor:
    """The largest magnitude in each row of x [T, C] -> [T] fp32; NaN for a row that has a NaN or an
    infinity. The largest of all workers' peaks is that of the whole row, which decides how it is
    rounded.
    """
    return peaks_of(x)


@op(axes={"x": 0, "peaks": 0}, format="linear")
def linear_partial(x: Tensor, w: Plain, peaks: Tensor | None = None) -> Tensor:
    """x [T, in] times the weight -> [T, out] without any scale, bias or rounding: int32 for whole
    numbers, else fp32. Sums of segments are added as `linear` adds them, so that x may have some of
    the inputs of a whole product: its part is a branch of the tree of that sum.

    peaks [T] fp32: of the whole rows, where x has a part of them and rows are rounded.
    """
    return add_up(w.partial(x, peaks))


@op(axes={"parts": 0, "peaks": 0}, format="linear")
def linear_total(
    parts: Tensor, w: Plain, peaks: Tensor | None, dtype: torch.dtype, addend: Addend | None = None
) -> Tensor:
    """Result of `linear` from partial sums: parts [T, N, out] of all N workers, in the order of the
    inputs -> [T, out] in `dtype`. peaks [T]: as for `linear_partial`, needed if rows are
    rounded.
    """
    total = w.conclude(add_up(parts), peaks)
    return (total if addend is None else with_addend(total, addend)).to(dtype)
