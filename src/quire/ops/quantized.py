"""Weights in small integers: the formats, and products with them.

`csrc/kernels/quantized.cpp` gives the same integers and scales, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.rounding import TINY, inverses_of, peaks_of, scales_of
from quire.ops.segments import Addend, add_to_rows, multiply, products

MOST = 127.0
"""The largest whole number of a byte that is used, of either sign."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a weight that is not kept in the model's dtype.

    fp8: 8-bit floats with an fp32 scale per output (`quire.ops.fp8`). int8: whole numbers of
    -127..127 with an fp32 scale per output. int4: -8..7 with a bf16 scale per output and `group`
    inputs (32, 64 or 128).

    rounds_rows: rows of activations are rounded too, with one scale per row, while the model
    runs, so that products are sums of integers. Otherwise they keep their values, and weights are
    widened to fp32: slower, for models whose activations have outliers.
    """

    name: Literal["int8", "int4", "fp8"]
    group: int = 0
    rounds_rows: bool = True

    def __post_init__(self) -> None:
        assert self.group in ((32, 64, 128) if self.name == "int4" else (0,))
        assert self.rounds_rows or self.name != "fp8"


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A weight as q [out, G, group] int8 times scales [out, G], and its bias [out] or None.

    Inputs are filled up with zeros to G whole groups; int8 has one. group, rounds_rows: see
    WeightFormat; segments: see `quire.ops.segments`.
    """

    in_features: int
    q: Tensor
    scales: Tensor
    bias: Tensor | None
    group: int = 0
    rounds_rows: bool = True
    segments: int = 1

    @property
    def out_features(self) -> int:
        return self.q.shape[0]

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype."""
        return add_to_rows(multiply(x, self), x, self, addend)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> [T, S, out]. For rounded rows the sum of a group is exact, and groups are
        added in order, in fp32.
        """
        if not self.rounds_rows:
            return self._widened(x.float())
        rows, _ = quantize_rows(x.float(), peaks)
        if not self.group:
            return products(rows, self.q[:, 0], self.segments, _exact).int()
        groups = self.q.shape[1]
        rows = F.pad(rows, (0, -self.in_features % self.group)).view(-1, groups, self.group)
        parts = torch.zeros(len(rows), self.segments, self.out_features, device=x.device)
        for i in range(groups):
            exact = _exact(rows[:, i], self.q[:, i])
            parts[:, i * self.segments // groups] += exact.float() * self.scales[:, i]
        return parts

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] times the scales that are left, plus bias."""
        total = total.float() * self.scales[:, 0] if total.dtype is torch.int32 else total
        if self.rounds_rows:
            assert peaks is not None, "rows that are rounded have a scale"
            total = total * scales_of(peaks, MOST)[:, None]
        return total if self.bias is None else total + self.bias

    def _widened(self, x: Tensor) -> Tensor:
        weight = (self.q * self.scales.unsqueeze(-1)).flatten(1)[:, : self.in_features]
        return products(x, weight, self.segments)


def _exact(rows: Tensor, q: Tensor) -> Tensor:
    # exact in any order of the sum, as whole numbers below 2**53 are
    return rows.double() @ q.double().T


def quantize_rows(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [*, C] fp32 -> whole numbers of -127..127 [*, C] (fp32) and scales [*, 1].

    peaks [*]: those of the rows that these are parts of. A row with a NaN or an infinity has a NaN
    as its scale.
    """
    largest = (peaks_of(x) if peaks is None else peaks).unsqueeze(-1)
    numbers = (x * inverses_of(largest, MOST)).round().clamp(-MOST, MOST)
    return numbers, scales_of(largest, MOST)


def quantize_weight(
    weight: Tensor,
    bias: Tensor | None,
    format: WeightFormat,
    segments: int = 1,
    peaks: Tensor | None = None,
) -> QuantizedLinear:
    """weight [out, in] of any float dtype, rounded to the format; peaks: see `pack_linear`."""
    wide, width = weight.float(), weight.shape[1]
    if format.name == "int8":
        q, scales = quantize_rows(wide, peaks)
        q = q.to(torch.int8).unsqueeze(1)
        return QuantizedLinear(width, q, scales, bias, 0, format.rounds_rows, segments)
    padded = F.pad(wide, (0, -width % format.group))
    groups = padded.unflatten(1, (-1, format.group))
    q, scales = _quantize_groups(groups)
    q = q.to(torch.int8)
    return QuantizedLinear(width, q, scales, bias, format.group, format.rounds_rows, segments)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups [out, G, group] -> whole numbers of -8..7, and scales [out, G] as bf16 holds them.

    The value of largest magnitude (the positive one of two) becomes -8, so that all sixteen numbers
    are in use.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(high >= -low, high, low)
    is_zero = extreme.abs() < TINY
    scale = (extreme / -8.0).bfloat16().float()
    # of the scale as it is stored, by which numbers are multiplied later
    inverse = torch.where(is_zero, 0.0, 1.0 / scale)
    scale = torch.where(is_zero, 0.0, scale) + (groups * 0).sum(-1, keepdim=True)
    return (groups * inverse).round().clamp(-8, 7), scale.squeeze(-1)
