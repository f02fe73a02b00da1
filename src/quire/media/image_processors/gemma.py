"""Gemma 3, whose long pictures may get crops, and Gemma 4, whose pictures keep their shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import Sides
from quire.media.image_processors.pixels import (
    BICUBIC,
    BILINEAR,
    HALF,
    Levels,
    patch_rows,
    resized,
    tiles,
)
from quire.media.image_processors.processor import (
    Arrays,
    PictureLayout,
    refused_shape,
    whole_layout,
)
from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Most tokens of a picture that Gemma 4 knows."""


@dataclass(frozen=True, slots=True)
class Gemma3Processor:
    """Gemma3ImageProcessor: the picture at one size, and if `pans` crops along its longer side."""

    levels: Levels
    resample: int
    size: Sides
    pans: bool
    min_crop_size: int
    max_num_crops: int
    min_ratio: float

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        size = settings.size("size", {"height": 224, "width": 224}, is_square=True)
        if size is None or not size.is_exact or not settings.flag("do_resize", True):
            raise settings.refused("size", size, "pictures are resized to a height and a width")
        return cls(
            levels=Levels.read(settings, HALF, HALF),
            resample=settings.resample(BILINEAR),
            size=(size.height, size.width),
            pans=settings.flag("do_pan_and_scan", False),
            min_crop_size=settings.whole("pan_and_scan_min_crop_size", 256),
            max_num_crops=settings.whole("pan_and_scan_max_num_crops", 4),
            min_ratio=settings.number("pan_and_scan_min_ratio_to_activate", 1.2),
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        rows, cols = self._crops(height, width) if self.pans else (0, 0)
        num = 1 + rows * cols
        return PictureLayout(height, width, self.size, self.size, rows, cols, num)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [1 + crops, 3, H, W], the whole picture first."""
        parts = [image]
        if layout.rows:
            height = math.ceil(image.height / layout.rows)
            width = math.ceil(image.width / layout.cols)
            parts += tiles(image, layout.rows, layout.cols, height, width)
        pixels = [self.levels.channels(resized(p, self.size, self.resample)) for p in parts]
        return {"pixel_values": np.stack(pixels)}

    def _crops(self, height: int, width: int) -> Sides:
        """(rows, columns) of the crops; (0, 0): none."""
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.min_ratio:
            return 0, 0
        # not `round`, which takes a half to the even number
        num = min(longer // self.min_crop_size, math.floor(longer / shorter + 0.5))
        num = min(self.max_num_crops, max(2, num))
        if min(math.ceil(longer / num), shorter) < self.min_crop_size:
            return 0, 0
        return (1, num) if width >= height else (num, 1)


@dataclass(frozen=True, slots=True)
class Gemma4Processor:
    """Gemma4ImageProcessor: as many patches as `max_soft_tokens` has room for, of which `pooling`
    squared are pooled into one token.
    """

    levels: Levels
    resample: int
    resizes: bool
    patch_size: int
    pooling: int
    max_patches: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        tokens = settings.whole("max_soft_tokens", 280)
        if tokens not in SOFT_TOKENS:
            allowed = f"it is one of {', '.join(map(str, SOFT_TOKENS))}"
            raise settings.refused("max_soft_tokens", tokens, allowed)
        pooling = settings.whole("pooling_kernel_size", 3)
        return cls(
            levels=Levels.read(settings, (0, 0, 0), (1, 1, 1), do_normalize=False),
            resample=settings.resample(BICUBIC),
            resizes=settings.flag("do_resize", True),
            patch_size=settings.whole("patch_size", 16),
            pooling=pooling,
            max_patches=tokens * pooling**2,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        unit = self.pooling * self.patch_size
        size = height, width
        if self.resizes:
            size = self._size(height, width)
        elif height % unit or width % unit:
            raise refused_shape(height, width, f"is not a multiple of {unit}")
        if size[0] * size[1] > self.max_patches * self.patch_size**2:
            raise refused_shape(height, width, f"has more than {self.max_patches} patches")
        return whole_layout(height, width, size)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [max patches, P * P * 3] and `image_position_ids` (x, y), -1: none."""
        channels = self.levels.channels(resized(image, layout.resized, self.resample))
        patches = patch_rows(channels, self.patch_size)
        rows, cols = (side // self.patch_size for side in layout.resized)
        values = np.zeros((self.max_patches, patches.shape[1]), np.float32)
        values[: len(patches)] = patches
        places = np.full((self.max_patches, 2), -1, np.int64)
        places[: len(patches), 0] = np.tile(np.arange(cols), rows)
        places[: len(patches), 1] = np.repeat(np.arange(rows), cols)
        return {"pixel_values": values, "image_position_ids": places}

    def _size(self, height: int, width: int) -> Sides:
        unit = self.pooling * self.patch_size
        scale = math.sqrt(self.max_patches * self.patch_size**2 / (height * width))
        tall = math.floor(scale * height / unit) * unit
        wide = math.floor(scale * width / unit) * unit
        longest = self.max_patches // self.pooling**2 * unit
        if not tall and not wide:
            raise refused_shape(height, width, f"becomes less than {unit} pixels on both sides")
        if not tall:
            return unit, min(width // height * unit, longest)
        if not wide:
            return min(height // width * unit, longest), unit
        return tall, wide
