"""Weights in 8-bit floats (e4m3, Micikevicius et al. 2022), and products with them.

Unlike integers, floats represent small values next to large ones; a scale only maps the largest
value to the type's largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of the type: it has no infinity."""

PIECE = 1 << 24
"""Weights that are rounded at once, or one output's: they are in fp32 several times meanwhile, and
a head of 500 million would take 8 GB of a GPU."""

TINY = 1e-30
"""Values that are all smaller than this are zeros: the inverse of their scale would be infinite."""


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A weight as numbers [out, in] in e4m3 times scales [out] fp32, and its bias [out] or None."""

    numbers: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype: rows rounded to e4m3 with a scale each, then a
        product in fp32.
        """
        rows, row_scales = fp8_rows(x.reshape(-1, self.in_features))
        y = F.linear(rows.float(), self.numbers.float()) * row_scales * self.scales
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] of any float dtype -> e4m3 [T, C] and fp32 scales [T, 1].

    A row with a NaN or an infinity has a NaN as its scale.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if x.shape[-1] else wide.new_zeros(len(x), 1)
    is_zero = largest < TINY
    most = torch.full_like(largest, LARGEST)  # a number / tensor would multiply with the reciprocal
    inverse = torch.where(is_zero, 0.0, most / largest)
    scales = torch.where(is_zero, 0.0, largest / LARGEST) + (wide * 0).sum(-1, keepdim=True)
    return (wide * inverse).nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(FP8), scales


def fp8_weight(weight: Tensor, bias: Tensor | None) -> Fp8Linear:
    """weight [out, in] of any float dtype, rounded with a scale per output."""
    numbers = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, PIECE // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        outputs = slice(start, start + step)
        numbers[outputs], found = fp8_rows(weight[outputs])
        scales[outputs] = found.squeeze(-1)
    return Fp8Linear(numbers, scales, bias)
