"""Which tokens grammars allow in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """`bits` [G, ceil(V/32)] int32 on the host are for the sampled rows at the indices `places`:
    bit i of word w is token 32 * w + i, 1 where it may be drawn. All other rows are free.
    """

    places: list[int]
    bits: np.ndarray
