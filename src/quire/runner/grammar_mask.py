"""Which tokens grammars allow in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.runner.devices.device import Stage


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """`bits` [G, ceil(V/32)] int32 on the host are for the sampled rows at the indices `places`:
    bit i of word w is token 32 * w + i, 1 where it may be drawn. All other rows are free. What is
    drawn at the `unknown` places does not count: no grammar allows the drafts before them, or
    nothing may follow these.
    """

    places: list[int]
    bits: np.ndarray
    unknown: Sequence[int] = ()

    def sent(self, stage: Stage) -> SentMask:
        """Copy the mask to the device with `stage`."""
        return SentMask(stage(np.array(self.places, dtype=np.int64)), stage(self.bits))


@dataclass(frozen=True, slots=True)
class SentMask:
    """A `GrammarMask` on the device: places [G] int64, bits [G, ceil(V/32)] int32."""

    places: Tensor
    bits: Tensor
