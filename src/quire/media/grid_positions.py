"""Positions of a prompt on three axes (time, height, width), for models with M-RoPE (Qwen2-VL)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""(first position of the picture's run, rows, columns), of merged patches."""


def grid_positions(num_tokens: int, grids: Iterable[Grid]) -> npt.NDArray[np.int32]:
    """The positions int32 [3, tokens] of a whole prompt with pictures at `grids`, in order.

    All axes count text together. A picture lies at one time, its rows and columns count from there,
    and what follows begins one after the largest of its positions.
    """
    result = np.empty((3, num_tokens), np.int32)
    done = position = 0
    for start, rows, cols in grids:
        result[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        done = start + rows * cols
        result[0, start:done] = position
        result[1, start:done] = np.repeat(np.arange(position, position + rows), cols)
        result[2, start:done] = np.tile(np.arange(position, position + cols), rows)
        position += max(rows, cols)
    result[:, done:] = np.arange(position, position + num_tokens - done)
    return result
