"""Weights in small integers: the formats, and products with them.

`csrc/kernels/quantized.cpp` gives the same integers and scales, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-30
"""Values that are all smaller than this are zeros: the inverse of their scale would be infinite."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is stored that is not kept in the model's dtype.

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

    Inputs are filled up with zeros to G whole groups; int8 has one group. rounds_rows: see
    WeightFormat.
    """

    in_features: int
    q: Tensor
    scales: Tensor
    bias: Tensor | None
    rounds_rows: bool = True

    @property
    def out_features(self) -> int:
        return self.q.shape[0]

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype. Of rounded rows the sum of a group is exact, and
        groups are added in order, in fp32.
        """
        if not self.rounds_rows:
            return self._multiply_widened(x)
        rows, row_scale = quantize_rows(x.reshape(-1, self.in_features).float())
        _, groups, group = self.q.shape
        rows = F.pad(rows, (0, groups * group - self.in_features)).view(-1, groups, group)
        total = torch.zeros(len(rows), self.out_features, device=x.device)
        for i in range(groups):
            exact = rows[:, i].double() @ self.q[:, i].double().T
            total += exact.float() * self.scales[:, i]
        total *= row_scale
        if self.bias is not None:
            total += self.bias
        return total.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _multiply_widened(self, x: Tensor) -> Tensor:
        weight = (self.q * self.scales.unsqueeze(-1)).flatten(1)[:, : self.in_features]
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), weight, bias).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] fp32 -> whole numbers of -127..127 [T, C] (fp32) and scales [T, 1].

    A row with a NaN or an infinity has a NaN as its scale.
    """
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(len(x), 1)
    is_zero = largest < TINY
    most = torch.full_like(largest, 127.0)  # a number / tensor would multiply with the reciprocal
    inverse = torch.where(is_zero, 0.0, most / largest)
    scale = torch.where(is_zero, 0.0, largest / 127.0) + (x * 0).sum(-1, keepdim=True)
    return (x * inverse).round().clamp(-127, 127), scale


def quantize_weight(weight: Tensor, bias: Tensor | None, format: WeightFormat) -> QuantizedLinear:
    """weight [out, in] of any float dtype, rounded to the format."""
    wide = weight.float()
    if format.name == "int8":
        q, scales = quantize_rows(wide)
        q = q.to(torch.int8).unsqueeze(1)
        return QuantizedLinear(weight.shape[1], q, scales, bias, format.rounds_rows)
    padded = F.pad(wide, (0, -weight.shape[1] % format.group))
    groups = padded.unflatten(1, (-1, format.group))
    q, scales = _quantize_groups(groups)
    return QuantizedLinear(weight.shape[1], q.to(torch.int8), scales, bias, format.rounds_rows)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups [out, G, group] -> whole numbers of -8..7, and scales [out, G] as bf16 holds them.

    The value of largest magnitude (the positive one of two) becomes -8, so that all sixteen numbers
    are in use.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(high >= -low, high, low)
    is_zero = extreme.abs() < TINY
    scale = (extreme / -8.0).bfloat16().float()
    inverse = torch.where(is_zero, 0.0, 1.0 / scale)
    scale = torch.where(is_zero, 0.0, scale) + (groups * 0).sum(-1, keepdim=True)
    return (groups * inverse).round().clamp(-8, 7), scale.squeeze(-1)
