"""Idefics3 and SmolVLM: enlarged to whole tiles, cut into them, the whole picture as the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import Sides
from quire.media.image_processors.pixels import HALF, LANCZOS, Levels, resized, tiles
from quire.media.image_processors.processor import Arrays, PictureLayout
from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_PIXELS = 4096
"""Bound on the longer side, whatever the settings say."""


@dataclass(frozen=True, slots=True)
class Idefics3Processor:
    """Idefics3ImageProcessor and SmolVLMImageProcessor. `longest`: pixels of the longer side;
    `exact`: both sides, instead; `tile`: of both sides of a tile.
    """

    levels: Levels
    resample: int
    resizes: bool
    longest: int
    exact: Sides
    tile: int
    splits: bool

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        settings.flag("do_pad", True)  # between the pictures of a batch
        size = settings.size("size", {"longest_edge": 4 * 364}, is_square=True)
        tile = settings.size("max_image_size", {"longest_edge": 364}, is_square=True)
        assert size is not None and tile is not None, "the class has a default"
        if not size.longest_edge and not size.is_exact:
            raise settings.refused("size", size, "it has a longest_edge, or height and width")
        if not tile.longest_edge:
            raise settings.refused("max_image_size", tile, "it has a longest_edge")
        return cls(
            levels=Levels.read(settings, HALF, HALF),
            resample=settings.resample(LANCZOS),
            resizes=settings.flag("do_resize", True),
            longest=size.longest_edge,
            exact=(size.height, size.width),
            tile=tile.longest_edge,
            splits=settings.flag("do_image_splitting", True),
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """The grid of tiles, none if the picture fits into one."""
        tile = (self.tile, self.tile)
        if self.splits:
            size = self._whole_tiles(*self._first(height, width))
            rows, cols = size[0] // self.tile, size[1] // self.tile
            if rows * cols > 1:
                return PictureLayout(height, width, tile, tile, rows, cols, rows * cols + 1)
            return PictureLayout(height, width, size, size)
        return PictureLayout(height, width, tile, tile)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [tiles, 3, H, W] and which pixels are there: all."""
        if self.resizes:
            image = resized(image, self._first(image.height, image.width), self.resample)
        if self.splits:
            size = self._whole_tiles(image.height, image.width)
            image = resized(image, size, self.resample)
        parts = []
        if layout.rows:
            parts = tiles(image, layout.rows, layout.cols, self.tile, self.tile)
        # of the enlarged picture, as in the reference, not of the original
        parts.append(resized(image, layout.tile, self.resample))
        values = np.stack([self.levels.channels(part) for part in parts])
        mask = np.ones((len(parts), *layout.tile), np.int64)
        return {"pixel_values": values, "pixel_attention_mask": mask}

    def _first(self, height: int, width: int) -> Sides:
        """The size of the first step: the longer side as set, the other kept even."""
        if not self.resizes:
            return height, width
        if not self.longest:
            return self.exact
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MOST_PIXELS:
            width, height = _MOST_PIXELS, int(_MOST_PIXELS / ratio)
        elif height > _MOST_PIXELS:
            width, height = int(_MOST_PIXELS * ratio), _MOST_PIXELS
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> Sides:
        """Multiples of the tile: the longer side first, the other from the shape."""
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return max(height, self.tile), max(width, self.tile)
