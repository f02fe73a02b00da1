"""Positions of a prompt's tokens on three axes: time, row and column (M-RoPE, Qwen2-VL section
2.1). Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Grid = tuple[int, int, int]
"""Frames, rows and columns of a picture's cells."""


def axial_positions(
    num_tokens: int, pictures: Iterable[tuple[int, Grid]]
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """int32 [3, num_tokens]. `pictures`: where each begins among the tokens, ascending, and its
    grid, of as many tokens. Text advances all axes at once, from one after the largest position
    before it.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    at, place = 0, 0  # of the next token; its position where it is text
    for start, grid in pictures:
        positions[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        cells = np.indices(grid).reshape(3, -1)
        at = start + cells.shape[1]
        positions[:, start:at] = cells + place
        place += max(grid)
    positions[:, at:] = np.arange(place, place + num_tokens - at)
    return positions
