"""Positions of patches: samples of learned grids, and tables of rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.models.vision.spec import AxialRope, Sampling
from quire.ops import RotaryTable

_KEYS = -0.75
"""The parameter of the cubic kernel (Keys 1981) with which torch samples."""


def sampled_grid(table: Tensor, sampling: Sampling, height: int, width: int) -> Tensor:
    """The vectors of a frame of height * width patches, row by row, in fp32 [height * width, C];
    `table` [side^2, C] has those of the learned grid.
    """
    side = round(len(table) ** 0.5)
    if height == width == side and sampling != "bucket":  # all of these sample themselves then
        return table.float()
    rows, columns = (
        axis_weights(sampling, size, side).to(table.device) for size in (height, width)
    )
    by_row = (rows @ table.float().view(side, -1)).view(height, side, -1)
    return (columns @ by_row).flatten(0, 1)


def axis_weights(sampling: Sampling, size: int, side: int) -> Tensor:
    """The share of each of `side` places of an axis in each of `size` patches, fp32 [size, side].

    Formulas and their order of rounding are those of transformers' vision utilities and of its
    models' embeddings.
    """
    assert sampling != "exact", "a frame of another size than the learned grid"
    at = torch.arange(size, dtype=torch.float32)
    if sampling == "bucket":
        borders = torch.arange(1 / side, 1.0, 1 / side)
        # rounding must not put the last corner behind the last border
        corners = (at * (1.0 / torch.tensor(size))).clamp(max=1.0 - 1e-6)
        return torch.eye(side)[torch.bucketize(corners, borders, right=True)]
    if sampling == "bilinear_corners":
        return _spread(at * (side - 1) / max(size - 1, 1), side, (0, 1), _linear)
    if sampling == "bilinear":
        return _spread((at + 0.5) * side / size - 0.5, side, (0, 1), _linear)
    if sampling == "bicubic":
        return _spread((at + 0.5) * side / size - 0.5, side, (-1, 0, 1, 2), _cubic)
    scale = side / torch.tensor(size, dtype=torch.float32)
    distances = torch.arange(side, dtype=torch.float32) - ((at + 0.5) * scale - 0.5)[:, None]
    # the kernel widens only where the grid becomes smaller, which is where aliasing would arise
    weights = _linear(distances.abs() / scale.clamp(min=1))
    return weights / weights.sum(1, keepdim=True)


def _spread(
    places: Tensor, side: int, offsets: Sequence[int], kernel: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weights of the neighbours of each place; what is beyond the border counts as the border."""
    floor = places.floor()
    weights = torch.zeros(len(places), side)
    for offset in offsets:
        near = (floor.long() + offset).clamp(0, side - 1)
        weights.scatter_add_(1, near[:, None], kernel((places - floor - offset).abs())[:, None])
    return weights


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    a = _KEYS
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far)


def axial_table(
    rope: AxialRope, head_dim: int, rows: Tensor, columns: Tensor, turns: Tensor
) -> RotaryTable:
    """The table of T patches at these rows and columns [T]; entry i is that of patch i. `turns`
    [T]: 0 where a token has no place and does not rotate, else 1.
    """
    half = head_dim // 2
    if rope.frequencies != "dealt":
        inverse = _frequencies(rope.theta, half)
        of_first, of_second = inverse, inverse
    else:
        inverse = _frequencies(rope.theta, head_dim)
        of_first, of_second = inverse[0::2], inverse[1::2]
    first, second = (rows, columns) if rope.first == "row" else (columns, rows)
    places = (first + rope.offset, of_first), (second + rope.offset, of_second)
    by_axis = [torch.outer(place.float(), inverse) for place, inverse in places]
    is_shared = rope.frequencies == "shared"
    angles = torch.stack(by_axis, 2).flatten(1) if is_shared else torch.cat(by_axis, 1)
    angles *= turns[:, None]
    table = torch.cat((angles.cos(), angles.sin()), 1)
    return RotaryTable(table, head_dim, rope.pairs == "neighbours")


def quarters_to_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys of so many heads, or a norm's weight, with values half a head apart
    that were a quarter of a head apart in each half.
    """
    return rows.unflatten(0, (heads, 2, 2, -1)).transpose(1, 2).flatten(0, 3)


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
