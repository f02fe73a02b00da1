"""The scale with which a row of numbers is rounded: the largest value becomes the
largest number of the type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.registry import WIDE

TINY = 1e-30
"""Values that are all smaller than this are zeros: the inverse of their scale would be infinite."""


def peaks_of(x: Tensor) -> Tensor:
    """The largest magnitude in each row of x [*, C] -> [*] fp32 (fp64 of fp64); NaN for a row that
    has a NaN or an infinity.
    """
    wide = x.to(WIDE[x.dtype])
    if not wide.shape[-1]:
        return wide.new_zeros(wide.shape[:-1])
    return wide.abs().amax(-1) + (wide * 0).sum(-1)


def scales_of(peaks: Tensor, most: float) -> Tensor:
    """Scales of rows with these peaks, if `most` is the largest number."""
    largest = torch.full_like(peaks, most)  # a GPU would multiply with the reciprocal of a number
    return torch.where(peaks < TINY, 0.0, peaks / largest)


def inverses_of(peaks: Tensor, most: float) -> Tensor:
    """Factors that turn values into numbers: 0 where all are zeros."""
    largest = torch.full_like(peaks, most)  # a number / tensor would multiply with the reciprocal
    return torch.where(peaks < TINY, 0.0, largest / peaks)
