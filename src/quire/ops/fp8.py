"""Weights in 8-bit floats (e4m3, Micikevicius et al. 2022), and products with them.

Unlike integers, floats represent small values next to large ones; a scale only maps the largest
value to the type's largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.rounding import inverses_of, peaks_of, scales_of
from quire.ops.segments import Addend, add_to_rows, multiply, products

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the type, which has no infinity."""

PIECE = 1 << 24
"""Weights that are rounded at once, or one output's: they are in fp32 several times meanwhile, and
a head of 500 million would take 8 GB of a GPU."""


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A weight as numbers [out, in] in e4m3 times scales [out] fp32, and its bias [out] or None.
    segments: see `quire.ops.segments`.
    """

    numbers: Tensor
    scales: Tensor
    bias: Tensor | None
    segments: int = 1

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype: rows rounded to e4m3 with a scale each, then a
        product in fp32.
        """
        return add_to_rows(multiply(x, self), x, self, addend)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> fp32 [T, S, out]."""
        rows, _ = fp8_rows(x, peaks)
        return products(rows.float(), self.numbers.float(), self.segments)

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] times the scales, plus bias."""
        assert peaks is not None, "rows that are rounded have a scale"
        y = total * scales_of(peaks, LARGEST)[:, None] * self.scales
        return y if self.bias is None else y + self.bias


def fp8_rows(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, C] of any float dtype -> e4m3 [T, C] and fp32 scales [T, 1].

    peaks [T]: of the rows that these are parts of. A row with a NaN or an infinity has a NaN as its
    scale.
    """
    wide = x.float()
    largest = (peaks_of(wide) if peaks is None else peaks).unsqueeze(-1)
    numbers = (wide * inverses_of(largest, LARGEST)).nan_to_num(0.0).clamp(-LARGEST, LARGEST)
    return numbers.to(FP8), scales_of(largest, LARGEST)


def fp8_weight(
    weight: Tensor, bias: Tensor | None, segments: int = 1, peaks: Tensor | None = None
) -> Fp8Linear:
    """weight [out, in] of any float dtype, rounded with a scale per output; peaks: see
    `pack_linear`.
    """
    numbers = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, PIECE // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        outputs = slice(start, start + step)
        own_peaks = None if peaks is None else peaks[outputs]
        numbers[outputs], own_scales = fp8_rows(weight[outputs], own_peaks)
        scales[outputs] = own_scales.squeeze(-1)
    return Fp8Linear(numbers, scales, bias, segments)
