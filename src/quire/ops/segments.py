"""The one order in which a product's inputs are added, whoever computes which part.

The inputs of a weight form 1, 2 or 4 segments of equal length. Each is summed by itself and kept
unrounded, then neighbours are added, ((0 + 1) + (2 + 3)), and only then come scales, bias, addend
and one rounding. Workers that have some of the inputs, whole segments of them, thus exchange sums
without changing a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.ops.registry import WIDE


@dataclass(frozen=True, slots=True)
class Addend:
    """What is added to some rows of a product before its activation and its rounding.

    values [A, out] fp32; rows [T] int32: the row of `values` that is added to each row of the
    product, or a negative number where there is none, which leaves that row's bits as they are.
    """

    values: Tensor
    rows: Tensor


class Format(Protocol):
    """A weight in one of plain torch's formats."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype."""
        ...

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> the sums of the segments [T, S, out], whole numbers in int32. peaks: see
        `linear_partial`.
        """
        ...

    def conclude(self, total: Tensor, peaks: Tensor) -> Tensor:
        """All segments' sum [T, out] times the scales, plus bias -> fp32."""
        ...


def add_up(parts: Tensor) -> Tensor:
    """parts [T, S, *], S a power of two -> [T, *], neighbours first."""
    assert parts.shape[1] & (parts.shape[1] - 1) == 0, "neighbours are added in pairs"
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def multiply(x: Tensor, w: Format, addend: Addend | None) -> Tensor:
    """x [*, in] -> [*, out] in x's dtype."""
    y = w.multiply(x)
    if addend is None:
        return y
    chosen = (addend.rows >= 0).nonzero().squeeze(1)
    some = x[chosen]
    wide = w.conclude(add_up(w.partial(some, None)), peaks_of(some))
    wide = wide + addend.values[addend.rows[chosen].long()]
    return y.index_copy(0, chosen, wide.to(y.dtype))


def with_addend(y: Tensor, addend: Addend) -> Tensor:
    """y [T, out] plus the addend's rows."""
    added = y + addend.values[addend.rows.clamp_min(0).long()]
    return torch.where(addend.rows[:, None] < 0, y, added)


def peaks_of(x: Tensor) -> Tensor:
    """The largest magnitude in each row of x [*, C] -> [*] fp32 (fp64 of
    fp64); NaN for a row that has a NaN or an
    infinity.
    """
    wide = x.to(WIDE[x.dtype])
    if not wide.shape[-1]:
        return wide.new_zeros(wide.shape[:-1])
    return wide.abs().amax(-1) + (wide * 0).sum(-1)
