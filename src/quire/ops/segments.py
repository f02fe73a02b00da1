"""The one order in which a product's inputs are added, whoever computes which part.

The inputs of a weight form 1, 2 or 4 segments of equal length. Each is summed by itself and kept
unrounded, then neighbours are added, ((0 + 1) + (2 + 3)), and only then come scales, bias, addend
and one rounding. Workers that have some of the inputs, whole segments of them, thus exchange sums
without changing a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.rounding import peaks_of


@dataclass(frozen=True, slots=True)
class Addend:
    """Values added to some rows of a product before its activation and its rounding.

    values [A, out] fp32; rows [T] int32: the row of `values` that is added to each row of the
    product, or a negative number where there is none, which leaves that row's bits as they are.
    """

    values: Tensor
    rows: Tensor


class Format(Protocol):
    """A weight whose segments can be multiplied by themselves."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> the sums of the segments [T, S, out], whole numbers in int32. peaks: see
        `linear_partial`.
        """
        ...

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """All segments' sum [T, out] times the scales, plus bias -> fp32."""
        ...


def add_up(parts: Tensor) -> Tensor:
    """parts [T, S, *] -> [T, *]: neighbours first where S is a power of two, else one after the
    other, as workers bring them that do not have whole segments.
    """
    if parts.shape[1] & (parts.shape[1] - 1):
        total = parts[:, 0]
        for part in parts.unbind(1)[1:]:
            total = total + part
        return total
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def products(
    x: Tensor, weight: Tensor, segments: int, product: Callable[[Tensor, Tensor], Tensor] = F.linear
) -> Tensor:
    """x [T, in] times weight [out, in], each segment of the inputs by itself -> [T, S, out]."""
    pairs = zip(x.chunk(segments, 1), weight.chunk(segments, 1), strict=True)
    return torch.stack([product(*pair) for pair in pairs], 1)


def unrounded(x: Tensor, w: Format) -> Tensor:
    """The whole product of x [T, in] -> fp32 [T, out]."""
    peaks = peaks_of(x)
    return w.conclude(add_up(w.partial(x, peaks)), peaks)


def multiply(x: Tensor, w: Format) -> Tensor:
    """The whole product of x [*, in] -> [*, out] in x's dtype."""
    y = unrounded(x.reshape(-1, w.in_features), w)
    return y.to(x.dtype).view(*x.shape[:-1], w.out_features)


def add_to_rows(y: Tensor, x: Tensor, w: Format, addend: Addend | None) -> Tensor:
    """y [T, out], the product of x [T, in] in its dtype, with the addend's rows computed anew."""
    if addend is None:
        return y
    chosen = (addend.rows >= 0).nonzero().squeeze(1)
    # computed again without a rounding, since the addend comes before the only one
    wide = unrounded(x[chosen], w) + addend.values[addend.rows[chosen].long()]
    return y.index_copy(0, chosen, wide.to(y.dtype))


def with_addend(y: Tensor, addend: Addend) -> Tensor:
    """y [T, out] plus the addend's rows."""
    added = y + addend.values[addend.rows.clamp_min(0).long()]
    # rows without an addend have read row 0, and keep their own bits
    return torch.where(addend.rows[:, None] < 0, y, added)
