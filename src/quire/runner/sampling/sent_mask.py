"""Grammar masks on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.runner.devices.device import Stage
from quire.step.grammar_mask import GrammarMask


@dataclass(frozen=True, slots=True)
class SentMask:
    """A `GrammarMask` on the device: places [G] int64, bits [G, ceil(V/32)] int32."""

    places: Tensor
    bits: Tensor


def sent_mask(mask: GrammarMask, stage: Stage) -> SentMask:
    """Copy the mask to the device with `stage`."""
    bits = np.require(mask.bits, requirements="W")  # a mask that was received is read-only
    return SentMask(stage(np.array(mask.places, dtype=np.int64)), stage(bits))
