"""LFM2-VL: small pictures whole at their own shape, large ones in tiles with an overview."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import Sides, closest_grid, unordered_grids_up_to
from quire.media.image_processors.pixels import (
    BILINEAR,
    HALF,
    Levels,
    patch_rows,
    resized,
    tiles,
)
from quire.media.image_processors.processor import Arrays, PictureLayout, refused_shape
from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Lfm2VlProcessor:
    """Lfm2VlImageProcessor. Every tile becomes rows of patches, padded to `max_patches`."""

    levels: Levels
    resample: int
    patch_size: int
    factor: int
    min_pixels: int
    max_pixels: int
    tolerance: float
    tile: int
    tile_range: Sides
    has_overview: bool
    pads: bool
    max_patches: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        """Read the settings, with the class's defaults. Pictures are always resized."""
        patch, shrink = (
            settings.whole("encoder_patch_size", 16),
            settings.whole("downsample_factor", 2),
        )
        least, most = settings.whole("min_tiles", 2), settings.whole("max_tiles", 10)
        splits = settings.flag("do_image_splitting", True)
        if least > most or most > 1024:
            raise settings.refused("max_tiles", most, "it is at least min_tiles, at most 1024")
        tile = settings.whole("tile_size", 512)
        if tile % patch:
            raise settings.refused("tile_size", tile, f"it is a multiple of {patch}")
        unit = (patch * shrink) ** 2
        most_tokens = settings.whole("max_image_tokens", 256)
        settings.value("max_num_patches", None)  # follows from the others
        return cls(
            levels=Levels.read(settings, HALF, HALF),
            resample=settings.resample(BILINEAR),
            patch_size=patch,
            factor=patch * shrink,
            min_pixels=settings.whole("min_image_tokens", 64) * unit,
            max_pixels=most_tokens * unit,
            tolerance=settings.number("max_pixels_tolerance", 2.0),
            tile=tile,
            tile_range=(least, most) if splits else (1, 1),
            has_overview=settings.flag("use_thumbnail", True),
            pads=settings.flag("do_pad", True),
            max_patches=max(most_tokens * shrink**2, (tile // patch) ** 2 if splits else 0),
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """The grid of tiles of a large picture; `resized`: the overview's, or a small picture's."""
        size = self._size(height, width)
        if size[0] * size[1] > self.max_patches * self.patch_size**2:
            raise refused_shape(height, width, f"becomes more than {self.max_patches} patches")
        if not self._is_large(height, width) or self.tile_range == (1, 1):
            return PictureLayout(height, width, size, size)
        tile = (self.tile, self.tile)
        rows, cols = closest_grid(height, width, tile, unordered_grids_up_to(*self.tile_range))
        num = rows * cols + (self.has_overview and rows * cols > 1)
        return PictureLayout(height, width, size, tile, rows, cols, num)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [tiles, patches, P * P * 3], which patches are there, and the grids."""
        parts = []
        if layout.rows:
            size = layout.rows * self.tile, layout.cols * self.tile
            whole = resized(image, size, self.resample)
            parts = tiles(whole, layout.rows, layout.cols, self.tile, self.tile)
        if len(parts) < layout.num_tiles:
            parts.append(resized(image, layout.resized, self.resample))
        rows = [patch_rows(self.levels.channels(part), self.patch_size) for part in parts]
        length = self.max_patches if self.pads else max(map(len, rows))
        values = np.zeros((len(parts), length, rows[0].shape[1]), np.float32)
        mask = np.zeros((len(parts), length), np.int32)
        for index, patches in enumerate(rows):
            values[index, : len(patches)] = patches
            mask[index, : len(patches)] = 1
        patch = self.patch_size
        shapes = np.array([[p.height // patch, p.width // patch] for p in parts], np.int64)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    def _size(self, height: int, width: int) -> Sides:
        unit = self.factor
        tall = max(unit, round(height / unit) * unit)
        wide = max(unit, round(width / unit) * unit)
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall = max(unit, math.floor(height / shrink / unit) * unit)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall = math.ceil(height * grow / unit) * unit
            wide = math.ceil(width * grow / unit) * unit
        return tall, wide

    def _is_large(self, height: int, width: int) -> bool:
        tall = max(self.patch_size, round(height / self.factor) * self.factor)
        wide = max(self.patch_size, round(width / self.factor) * self.factor)
        return tall * wide > self.max_pixels * self.tolerance
