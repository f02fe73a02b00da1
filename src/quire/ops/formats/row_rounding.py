"""Activations that a checkpoint's format rounds before a product.

`csrc/kernels/round_rows.hpp` gives the same numbers, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from quire.ops.fp8 import FP8, LARGEST
from quire.ops.quantized import MOST
from quire.ops.rounding import inverses_of, peaks_of, scales_of

_MOST = {"e4m3": LARGEST, "int8": MOST}


@dataclass(frozen=True, slots=True)
class RowRounding:
    """Rounding of rows of activations to numbers of a type times scales.

    scale: of all values, as a calibration found it, an fp32 number; None: what maps the largest
    magnitude of each `group` inputs, or with a group of 0 of the row, to the type's largest number.
    """

    to: Literal["e4m3", "int8"]
    group: int = 0
    scale: float | None = None

    @property
    def needs_peaks(self) -> bool:
        """Whether a part of a row cannot be rounded by itself."""
        return self.scale is None and not self.group

    def rounded(self, x: Tensor, peaks: Tensor | None = None) -> Tensor:
        """x [T, C] -> what the rounded numbers stand for, fp32 [T, C]; peaks [T]: of the rows that
        these are parts of. A NaN or an infinity makes NaNs of all that shares its scale, unless
        that is fixed.
        """
        x = x.float()
        if self.scale is not None:
            return self._numbers(x * (1.0 / self.scale)) * self.scale
        if not self.group:
            return self._scaled(x, peaks_of(x) if peaks is None else peaks.float())
        groups = F.pad(x, (0, -x.shape[1] % self.group)).unflatten(1, (-1, self.group))
        return self._scaled(groups, peaks_of(groups)).flatten(1)[:, : x.shape[1]]

    def joined(self, other: RowRounding) -> RowRounding | None:
        """The rounding of rows for two weights as one; None where it is not the same. The larger
        scale holds the values of both.
        """
        if self.scale is None or other.scale is None:
            return self if self == other else None
        same = replace(other, scale=self.scale) == self
        return replace(self, scale=max(self.scale, other.scale)) if same else None

    def _scaled(self, x: Tensor, peaks: Tensor) -> Tensor:
        peaks, most = peaks.unsqueeze(-1), _MOST[self.to]
        return self._numbers(x * inverses_of(peaks, most)) * scales_of(peaks, most)

    def _numbers(self, x: Tensor) -> Tensor:
        most = _MOST[self.to]
        within = x.clamp(-most, most)
        return within.to(FP8).float() if self.to == "e4m3" else within.round()
