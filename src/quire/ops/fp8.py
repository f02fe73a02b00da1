"""Weights in 8-bit floats (e4m3, Micikevicius et al. 2022), and products with them.

Unlike integers, floats represent small values next to large ones; a scale only maps the largest
value to the type's largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.segments import add_up, peaks_of

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

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype: rows rounded to e4m3 with a scale each, then a
        product in fp32.
        """
        rows = x.reshape(-1, self.in_features)
        y = self.conclude(add_up(self.partial(rows, None)), peaks_of(rows))
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> fp32 [T, S, out]."""
        rows = fp8_rows(x, peaks)[0].float(), self.numbers.float()
        pairs = zip(*(t.chunk(self.segments, 1) for t in rows), strict=True)
        return torch.stack([F.linear(inputs, numbers) for inputs, numbers in pairs], 1)

    def conclude(self, total: Tensor, peaks: Tensor) -> Tensor:
        """total [T, out] times the scales, plus bias."""
        y = total * _row_scales(peaks)[:, None] * self.scales
        return y if self.bias is None else y + self.bias


def fp8_rows(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, C] of any float dtype -> e4m3 [T, C] and fp32 scales [T, 1].

    peaks [T]: of the rows that these are parts of. A row with a NaN or an infinity has a NaN as its
    scale.
    """
    wide = x.float()
    largest = (peaks_of(wide) if peaks is None else peaks).unsqueeze(-1)
    most = torch.full_like(largest, LARGEST)  # a number / tensor would multiply with the reciprocal
    inverse = torch.where(largest < TINY, 0.0, most / largest)
    numbers = (wide * inverse).nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers, _row_scales(largest)


def _row_scales(peaks: Tensor) -> Tensor:
    return torch.where(peaks < TINY, 0.0, peaks / LARGEST)


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
        found = fp8_rows(weight[outputs], None if peaks is None else peaks[outputs])
        numbers[outputs], scales[outputs] = found[0], found[1].squeeze(-1)
    return Fp8Linear(numbers, scales, bias, segments)
