"""The order of a step's patches: frames of several pictures one after the other, each as a
sequence of cells, perhaps sorted by windows. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """The T patches of a step in the order in which blocks see them.

    `rows` and `columns` [T] of patches in their frames; `frames` (height, width) in patches;
    `raster` [T]: where each patch is when frames are read row by row; `windows`: how many patches
    each window has, () where there are none; `cells` [T / merge^2]: which cell of a frame-by-frame
    order each one is.
    """

    frames: tuple[tuple[int, int], ...]
    rows: IntArray
    columns: IntArray
    raster: IntArray
    cells: IntArray
    windows: tuple[int, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Patches of each frame."""
        return [height * width for height, width in self.frames]


def lay_out(
    frames: Sequence[tuple[int, int]], merge: int, window: int | None = None
) -> PatchLayout:
    """The layout of (height, width) patches, multiples of `merge`; `window`: see `VisionTower`."""
    orders, cells, windows = [], [], []
    at = 0
    for height, width in frames:
        assert height % merge == width % merge == 0, "a frame is whole cells"
        grid = np.arange(height * width, dtype=np.int64)
        cut = grid.reshape(height // merge, merge, width // merge, merge)
        by_cell = cut.swapaxes(1, 2).reshape(-1, merge**2)
        order, sizes = _by_windows(height // merge, width // merge, window)
        orders.append(by_cell[order].ravel())
        cells.append(order + at)
        windows += [size * merge**2 for size in sizes]
        at += len(order)
    starts = np.cumsum([0, *(height * width for height, width in frames)])
    return PatchLayout(
        tuple(frames),
        rows=_joined(o // width for o, (_, width) in zip(orders, frames, strict=True)),
        columns=_joined(o % width for o, (_, width) in zip(orders, frames, strict=True)),
        raster=_joined(o + start for o, start in zip(orders, starts[:-1], strict=True)),
        cells=_joined(cells),
        windows=tuple(windows),
    )


def _by_windows(height: int, width: int, side: int | None) -> tuple[IntArray, list[int]]:
    """The cells of a frame window by window, and how many each window has."""
    grid = np.arange(height * width, dtype=np.int64).reshape(height, width)
    if side is None:
        return grid.ravel(), []
    found = [
        grid[row : row + side, column : column + side].ravel()
        for row in range(0, height, side)
        for column in range(0, width, side)
    ]
    return np.concatenate(found), [len(cells) for cells in found]


def _joined(parts: object) -> IntArray:
    arrays: list[IntArray] = list(parts)  # type: ignore[call-overload]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
