"""InternVL (GotOcr2), Command A Vision and Llama 4: tiles of one size, an overview as the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import (
    Sides,
    closest_grid,
    grids_up_to,
    least_scaled_grid,
)
from quire.media.image_processors.pixels import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Levels,
    on_canvas,
    resized,
    tiles,
)
from quire.media.image_processors.processor import Arrays, PictureLayout
from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class GotOcr2Processor:
    """GotOcr2ImageProcessor, of InternVL and Aya Vision: the grid closest in shape."""

    levels: Levels
    resample: int
    tile: Sides
    splits: bool
    min_tiles: int
    max_tiles: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        return cls._read(settings, {"height": 384, "width": 384}, splits=False)

    @classmethod
    def _read(cls, settings: ProcessorSettings, size: dict[str, int], *, splits: bool) -> Self:
        wanted = settings.size("size", size, is_square=True)
        if wanted is None or not wanted.is_exact or not settings.flag("do_resize", True):
            raise settings.refused("size", wanted, "tiles are resized to a height and a width")
        least, most = settings.whole("min_patches", 1), settings.whole("max_patches", 12)
        if most > 1024:
            raise settings.refused("max_patches", most, "a picture has at most 1024 tiles")
        return cls(
            levels=Levels.read(settings, CLIP_MEAN, CLIP_STD),
            resample=settings.resample(BICUBIC),
            tile=(wanted.height, wanted.width),
            splits=settings.flag("crop_to_patches", splits),
            min_tiles=least,
            max_tiles=most,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """The grid of tiles; with more than one there is an overview."""
        rows, cols = self._grid(height, width) if self.splits else (1, 1)
        num = rows * cols
        if num == 1:
            return PictureLayout(height, width, self.tile, self.tile)
        return PictureLayout(height, width, self.tile, self.tile, rows, cols, num + 1)

    def _grid(self, height: int, width: int) -> Sides:
        if self.max_tiles == 1:
            return 1, 1
        return closest_grid(height, width, self.tile, grids_up_to(self.min_tiles, self.max_tiles))

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [tiles, 3, H, W]."""
        parts = []
        if layout.rows:
            size = layout.rows * self.tile[0], layout.cols * self.tile[1]
            whole = resized(image, size, self.resample)
            parts = tiles(whole, layout.rows, layout.cols, *self.tile)
        parts.append(resized(image, self.tile, self.resample))
        return {"pixel_values": np.stack([self.levels.channels(part) for part in parts])}


class Cohere2VisionProcessor(GotOcr2Processor):
    """Cohere2VisionImageProcessor: the grid that is scaled least."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        settings.value("patch_size", 16)  # for the prompt alone
        return cls._read(settings, {"height": 512, "width": 512}, splits=True)

    def _grid(self, height: int, width: int) -> Sides:
        return least_scaled_grid(height, width, self.tile[0], self.max_tiles)


@dataclass(frozen=True, slots=True)
class Llama4Processor:
    """Llama4ImageProcessor: padded to the canvas of tiles that it fits best without distortion; its
    values are rounded to bfloat16.
    """

    levels: Levels
    resample: int
    tile: int
    canvases: tuple[Sides, ...]
    fills_largest: bool

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        size = settings.size("size", {"height": 336, "width": 336}, is_square=True)
        if size is None or not size.is_exact or size.height != size.width:
            raise settings.refused("size", size, "tiles are square")
        if not settings.flag("do_resize", True):
            raise settings.refused("do_resize", False, "pictures are resized to their canvas")
        most = settings.whole("max_patches", 16)
        if most > 1024:
            raise settings.refused("max_patches", most, "a picture has at most 1024 tiles")
        return cls(
            levels=Levels.read(settings, HALF, HALF, is_bfloat16=True),
            resample=settings.resample(BILINEAR),
            tile=size.height,
            canvases=_canvases(most),
            fills_largest=settings.flag("resize_to_max_canvas", False),
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """The grid of the canvas; with more than one tile there is an overview."""
        rows, cols = self._canvas(height, width)
        tile, num = (self.tile, self.tile), rows * cols
        return PictureLayout(height, width, tile, tile, rows, cols, num + (num > 1))

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [tiles, 3, H, W] and the grid as `aspect_ratios`."""
        rows, cols = layout.rows, layout.cols
        canvas = rows * self.tile, cols * self.tile
        inner = resized(image, self._inner(image.height, image.width, canvas), self.resample)
        padded = on_canvas(inner, *canvas, 0, 0, (0, 0, 0))
        parts = tiles(padded, rows, cols, self.tile, self.tile)
        if rows * cols > 1:
            parts.append(resized(image, layout.tile, self.resample))
        values = np.stack([self.levels.channels(part) for part in parts])
        return {"pixel_values": values, "aspect_ratios": np.array([rows, cols], np.int64)}

    def _canvas(self, height: int, width: int) -> Sides:
        """(rows, columns): the least enlarging, else shrinking; of equals the smallest."""
        # Scales are compared as float32, as the reference has them in tensors.
        scales = [
            min(
                np.float32(cols * self.tile) / np.float32(width),
                np.float32(rows * self.tile) / np.float32(height),
            )
            for rows, cols in self.canvases
        ]
        enlarging = [scale for scale in scales if scale >= 1]
        if enlarging:
            chosen = max(enlarging) if self.fills_largest else min(enlarging)
        else:
            chosen = max(scales)
        fitting = [c for c, s in zip(self.canvases, scales, strict=True) if s == chosen]
        return min(fitting, key=lambda grid: grid[0] * grid[1])

    def _inner(self, height: int, width: int, canvas: Sides) -> Sides:
        """The size within the canvas, which enlarges small pictures to one tile at most."""
        tall, wide = canvas
        if not self.fills_largest:
            tall = min(max(height, self.tile), tall)
            wide = min(max(width, self.tile), wide)
        if wide / width < tall / height:
            return max(1, min(math.floor(height * (wide / width)), tall)), wide
        return tall, max(1, min(math.floor(width * (tall / height)), wide))


def _canvases(most: int) -> tuple[Sides, ...]:
    """All (rows, columns) of at most `most` tiles, from the most to one, those of a shape together:
    the order of the reference, which decides between equals.
    """
    by_shape: dict[float, list[Sides]] = {}
    for num in range(most, 0, -1):
        for rows in range(1, num + 1):
            if num % rows == 0:
                by_shape.setdefault(rows / (num // rows), []).append((rows, num // rows))
    return tuple(grid for grids in by_shape.values() for grid in grids)
