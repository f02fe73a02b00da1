"""Masks of the tokens that grammars allow in a step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


class GrammarMask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`bits` [G, ceil(V/32)] int32 on the host are for the sampled rows at the indices `places`:
    bit i of word w is token 32 * w + i, 1 where it may be drawn. All other rows are free. What is
    drawn at the `unknown` places does not count: no grammar allows the drafts before them, or
    nothing may follow these.
    """

    places: list[int]
    bits: np.ndarray[Any, np.dtype[np.int32]]
    unknown: list[int] = []
