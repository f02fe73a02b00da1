"""The arrangement of a picture's rows whose tiles were chosen by its size (LLaVA-NeXT)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.vision.spec import TiledPicture

_LEAST_RATIO = 1.1
"""Ratio up to which a grid that is larger in each direction stays as it is."""


def arranged(
    rows: Tensor,
    frames: Sequence[tuple[int, int]],
    size: tuple[int, int],
    newline: Tensor,
    tiles: TiledPicture,
    side: int,
) -> Tensor:
    """The rows [n, width] of a picture of `size` (height, width) out of those of its frames, the
    first of which is the whole picture; a tile is a square of `side` pixels.
    """
    height, width = frames[0]
    if len(frames) == 1:
        return torch.cat((rows, newline[None])) if tiles.ends_single else rows
    whole, rest = rows[: height * width], rows[height * width :]
    best = best_size(size, tiles.sizes)
    down, across = best[0] // side, best[1] // side
    assert down * across == len(frames) - 1, "tiles of another size"
    grid = rest.view(down, across, height, width, -1).permute(4, 0, 2, 1, 3)
    grid = grid.flatten(1, 2).flatten(2, 3)  # [width of a row, lines, columns]
    grid = _without_padding(grid, size)
    if tiles.most_tiles is not None:
        grid = _bounded(grid, tiles.most_tiles * height**2)
    ends = newline[:, None, None].expand(*grid.shape[:-1], 1)
    lines = torch.cat((grid, ends), 2).flatten(1).transpose(0, 1)
    return torch.cat((whole, lines))


def best_size(size: tuple[int, int], sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of a picture's pixels; of equals the smallest."""

    def fit(candidate: tuple[int, int]) -> tuple[int, int]:
        (high, wide), (height, width) = candidate, size
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - wide * high

    return max(sizes, key=fit)


def _without_padding(grid: Tensor, size: tuple[int, int]) -> Tensor:
    """grid [C, lines, columns] without the borders that filled up a picture of `size`."""
    (height, width), (lines, columns) = size, grid.shape[1:]
    if width / height > columns / lines:
        # seven digits as in transformers: a product just below a whole number must not lose a line
        border = (lines - int(round(height * (columns / width), 7))) // 2
        return grid[:, border : lines - border, :]
    border = (columns - int(round(width * (lines / height), 7))) // 2
    return grid[:, :, border : columns - border]


def _bounded(grid: Tensor, most: int) -> Tensor:
    """grid [C, lines, columns] with at most about so many patches."""
    lines, columns = grid.shape[1:]
    ratio = math.sqrt(lines * columns / most)
    if ratio <= _LEAST_RATIO:
        return grid
    target = [int(lines // ratio), int(columns // ratio)]
    return F.interpolate(grid[None], target, mode="bilinear")[0]
