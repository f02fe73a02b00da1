"""Pictures as towers take them, out of the arrays that image processors make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.vision.spec import PatchEmbedding, VisionTower

Frame = tuple[int, int]
"""Rows and columns of patches."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as its processor leaves it.

    `pixels`: frames [n, channels, height, width], or patches [N, values] of a tower whose pictures
    come cut, which have `frames` of these. `size`: height and width of the picture as it was given,
    for towers that arrange tiles by it.
    """

    pixels: Tensor
    frames: tuple[Frame, ...] = ()
    size: tuple[int, int] | None = None


def picture_of(inputs: Mapping[str, Any], tower: VisionTower) -> Picture:
    """The picture in a processor's arrays, which have the names of transformers, without those for
    a batch. Raises ValueError for arrays that do not fit each other or the tower.
    """
    pixels = np.asarray(inputs["pixel_values"])
    if not tower.patch.is_cut:
        picture = Picture(_tensor(pixels if pixels.ndim == 4 else pixels[None]), size=_size(inputs))
    elif "image_grid_thw" in inputs:
        count, *frame = (int(n) for n in np.asarray(inputs["image_grid_thw"]).reshape(3))
        pixels = pixels.reshape(len(pixels), -1)  # of some, each patch is [channels, P, P]
        picture = Picture(_tensor(pixels), ((frame[0], frame[1]),) * count)
    elif "spatial_shapes" in inputs:
        shapes = [(int(h), int(w)) for h, w in np.asarray(inputs["spatial_shapes"]).reshape(-1, 2)]
        tiles = pixels.reshape(len(shapes), -1, pixels.shape[-1])
        # tiles come padded to the longest
        parts = [tile[: h * w] for tile, (h, w) in zip(tiles, shapes, strict=True)]
        picture = Picture(_tensor(np.concatenate(parts)), tuple(shapes))
    else:
        places = np.asarray(inputs["image_position_ids"]).reshape(-1, 2)
        # places of -1 are padding
        places = places[places[:, 0] >= 0]
        columns, rows = (int(n) + 1 for n in places.max(axis=0))
        picture = Picture(
            _tensor(pixels.reshape(-1, pixels.shape[-1])[: len(places)]), ((rows, columns),)
        )
    _check(picture, tower)
    return picture


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.tensor(values)


def _size(inputs: Mapping[str, Any]) -> tuple[int, int] | None:
    if "image_sizes" not in inputs:
        return None
    height, width = (int(n) for n in np.asarray(inputs["image_sizes"]).reshape(2))
    return height, width


def _check(picture: Picture, tower: VisionTower) -> None:
    """Raise ValueError for a picture that the tower cannot take: nothing after this looks."""
    patch, shape = tower.patch, tuple(picture.pixels.shape)
    if patch.is_cut:
        patches = sum(height * width for height, width in picture.frames)
        is_right = shape == (patches, patch.inputs)
    else:
        is_right = len(shape) == 4 and shape[1] == patch.channels
        is_right = is_right and (tower.image_size is None or shape[2:] == tower.image_size)
    frames = frames_of(picture, patch) if is_right else []
    if not frames or any(n < 1 or n % tower.merge for frame in frames for n in frame):
        raise ValueError(f"pixels of the shape {shape} do not fit the vision encoder")
    if tower.tiles is not None and picture.size is None:
        raise ValueError("image_sizes are missing")


def frames_of(picture: Picture, patch: PatchEmbedding) -> list[Frame]:
    """Height and width of each frame in patches."""
    if patch.is_cut:
        return list(picture.frames)
    count, _, height, width = picture.pixels.shape
    return [(height // patch.size, width // patch.size)] * count


def vectors_of(picture: Picture, patch: PatchEmbedding) -> Tensor:
    """A picture's patches [T, values], frame by frame, row by row where it comes uncut."""
    if patch.is_cut:
        return picture.pixels
    size = patch.size
    count, channels, height, width = picture.pixels.shape
    rows, columns = height // size, width // size
    # a convolution leaves out what is not a whole patch, too
    x = picture.pixels[:, :, : rows * size, : columns * size]
    x = x.reshape(count, channels, rows, size, columns, size)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(count * rows * columns, patch.inputs)
