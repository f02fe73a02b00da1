"""Processors that keep shapes and cut patches: Qwen-VL, GLM-4V, PaddleOCR-VL, Kimi, Pixtral."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from quire.media.image_processors.geometry import (
    Sides,
    multiple_within,
    multiple_within_for_frames,
    within_patches,
)
from quire.media.image_processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    FloatArray,
    Levels,
    centre_cut,
    on_canvas,
    resized,
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


@dataclass(frozen=True, slots=True)
class Qwen2VLProcessor:
    """Qwen2VLImageProcessor: sides are multiples of `patch_size * merge_size`, the product of both
    lies within `min_pixels` and `max_pixels`.
    """

    EDGES: ClassVar[Sides] = (56 * 56, 28 * 28 * 1280)
    FRAMES: ClassVar[int] = 2

    levels: Levels
    resample: int
    resizes: bool
    patch_size: int
    frames: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        """Read the settings. `min_pixels` and `max_pixels` beat the edges of `size`."""
        edges = dict(zip(("shortest_edge", "longest_edge"), cls.EDGES, strict=True))
        given = settings.value("size", None)
        if given is not None and not isinstance(given, dict):
            raise settings.refused("size", given, "it has a shortest_edge and a longest_edge")
        given = dict(edges if given is None else given)
        shortest = given.pop("min_pixels", given.get("shortest_edge"))
        longest = given.pop("max_pixels", given.get("longest_edge"))
        shortest = settings.value("min_pixels", shortest)
        longest = settings.value("max_pixels", longest)
        bounds = ProcessorSettings(settings.name, {"min_pixels": shortest, "max_pixels": longest})
        if shortest is None or longest is None or given.keys() - edges.keys():
            raise settings.refused("size", given, "it has a shortest_edge and a longest_edge")
        least, most = bounds.whole("min_pixels", 1), bounds.whole("max_pixels", 1)
        if least > most:
            raise settings.refused("size", given, "its shortest_edge is the smaller of both")
        return cls(
            levels=Levels.read(settings, CLIP_MEAN, CLIP_STD),
            resample=settings.resample(BICUBIC),
            resizes=settings.flag("do_resize", True),
            patch_size=settings.whole("patch_size", 14),
            frames=settings.whole("temporal_patch_size", cls.FRAMES),
            merge_size=settings.whole("merge_size", 2),
            min_pixels=least,
            max_pixels=most,
        )

    @property
    def factor(self) -> int:
        """Pixels that both sides are a multiple of."""
        return self.patch_size * self.merge_size

    def layout(self, height: int, width: int) -> PictureLayout:
        size = height, width
        if self.resizes:
            size = self._size(height, width)
        elif height % self.factor or width % self.factor:
            raise refused_shape(height, width, f"is not a multiple of {self.factor}")
        return whole_layout(height, width, size)

    def _size(self, height: int, width: int) -> Sides:
        return multiple_within(height, width, self.factor, self.min_pixels, self.max_pixels)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [patches, 3 * T * P * P] and `image_grid_thw` in patches."""
        channels = self.levels.channels(resized(image, layout.resized, self.resample))
        rows, cols = (side // self.patch_size for side in layout.resized)
        grid = np.array([1, rows, cols], np.int64)
        return {"pixel_values": self._patches(channels, rows, cols), "image_grid_thw": grid}

    def _patches(self, channels: FloatArray, rows: int, cols: int) -> FloatArray:
        """Rows of patches, those that are merged next to each other, each repeated as frames."""
        patch, merge = self.patch_size, self.merge_size
        parts = channels.reshape(3, rows // merge, merge, patch, cols // merge, merge, patch)
        parts = parts.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        shape = (*parts.shape[:5], self.frames, patch, patch)
        # a picture is a film of equal frames to this encoder
        return np.broadcast_to(parts, shape).reshape(rows * cols, -1)


class Glm4vProcessor(Qwen2VLProcessor):
    """Glm4vImageProcessor and Glm46VImageProcessor."""

    __slots__ = ()

    EDGES = (112 * 112, 28 * 28 * 15000)

    def _size(self, height: int, width: int) -> Sides:
        return multiple_within_for_frames(
            height, width, self.factor, self.frames, self.min_pixels, self.max_pixels
        )


class PaddleOCRVLProcessor(Qwen2VLProcessor):
    """PaddleOCRVLImageProcessor: a picture that is smaller than a cell is enlarged to it first."""

    __slots__ = ()

    EDGES = (384 * 384, 1536 * 1536)
    FRAMES = 1

    def _size(self, height: int, width: int) -> Sides:
        if height < self.factor:
            height, width = self.factor, round(width * self.factor / height)
        if width < self.factor:
            height, width = round(height * self.factor / width), self.factor
        return multiple_within(height, width, self.factor, self.min_pixels, self.max_pixels)

    def _patches(self, channels: FloatArray, rows: int, cols: int) -> FloatArray:
        """[patches, 3 * T, P, P], row by row."""
        return row_by_row(np.repeat(channels, self.frames, axis=0), rows, cols)


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """PixtralImageProcessor: shrinks to the longest edges, then enlarges to whole patches."""

    levels: Levels
    resample: int
    resizes: bool
    longest: Sides
    patch: Sides
    crop: Sides | None

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        settings.flag("do_pad", True)  # between the pictures of a batch
        size = settings.size("size", {"longest_edge": 1024}, is_square=True)
        patch = settings.size("patch_size", {"height": 16, "width": 16}, is_square=True)
        crop = settings.size("crop_size", None, is_square=True)
        assert size is not None and patch is not None, "the class has a default"
        if not size.longest_edge and not size.is_exact:
            raise settings.refused("size", size, "it has a longest_edge, or height and width")
        if not patch.is_exact:
            raise settings.refused("patch_size", patch, "it has a height and a width")
        crops = settings.flag("do_center_crop", False)
        if crops and (crop is None or not crop.is_exact):
            raise settings.refused("crop_size", crop, "it has a height and a width")
        edge = size.longest_edge
        return cls(
            levels=Levels.read(settings, CLIP_MEAN, CLIP_STD),
            resample=settings.resample(BICUBIC),
            resizes=settings.flag("do_resize", True),
            longest=(edge, edge) if edge else (size.height, size.width),
            patch=(patch.height, patch.width),
            crop=(crop.height, crop.width) if crops and crop is not None else None,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        size = self._size(height, width) if self.resizes else (height, width)
        return whole_layout(height, width, size if self.crop is None else self.crop)

    def _size(self, height: int, width: int) -> Sides:
        ratio = max(height / self.longest[0], width / self.longest[1])
        sides = (height, width)
        if ratio > 1:
            sides = int(height / ratio), int(width / ratio)
        # A side of which nothing is left still has the one patch that rounding up gives the others.
        rows, cols = (
            max(1, (side - 1) // patch + 1) for side, patch in zip(sides, self.patch, strict=True)
        )
        return rows * self.patch[0], cols * self.patch[1]

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [3, H, W] and `image_sizes`."""
        if self.resizes:
            size = self._size(image.height, image.width)
            image = resized(image, size, self.resample)
        if self.crop is not None:
            image = centre_cut(image, *self.crop)
        sizes = np.array(layout.tile, np.int64)
        return {"pixel_values": self.levels.channels(image), "image_sizes": sizes}


@dataclass(frozen=True, slots=True)
class KimiK25Processor:
    """Kimi_K25ImageProcessor: shrinks to a number of patches, then fills up with black to whole
    squares of merged ones.
    """

    levels: Levels
    resample: int
    resizes: bool
    patch_size: int
    merge_size: int
    max_patches: int
    max_side: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        size = settings.size("size", {"max_height": 512, "max_width": 512}, is_square=True)
        if size is None or not size.max_height or size.max_height != size.max_width:
            raise settings.refused("size", size, "it has max_height and max_width, both the same")
        return cls(
            levels=Levels.read(settings, HALF, HALF),
            resample=settings.resample(BICUBIC),
            resizes=settings.flag("do_resize", True),
            patch_size=settings.whole("patch_size", 14),
            merge_size=settings.whole("merge_size", 2),
            max_patches=settings.whole("max_patches", 16384),
            max_side=size.max_height,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """One tile, with what it is filled up with."""
        unit, size = self.patch_size * self.merge_size, (height, width)
        if self.resizes:
            tall, wide = self._inner(height, width)
            size = -(-tall // unit) * unit, -(-wide // unit) * unit
        elif height % unit or width % unit:
            raise refused_shape(height, width, f"is not a multiple of {unit}")
        return whole_layout(height, width, size)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [patches, 3, P, P] and `image_grid_thw` in patches."""
        if self.resizes:
            image = resized(image, self._inner(image.height, image.width), self.resample)
        channels = self.levels.channels(on_canvas(image, *layout.tile, 0, 0, (0, 0, 0)))
        rows, cols = (side // self.patch_size for side in layout.tile)
        values = row_by_row(channels, rows, cols)
        return {"pixel_values": values, "image_grid_thw": np.array([1, rows, cols], np.int64)}

    def _inner(self, height: int, width: int) -> Sides:
        return within_patches(height, width, self.patch_size, self.max_patches, self.max_side)


def row_by_row(channels: FloatArray, rows: int, cols: int) -> FloatArray:
    """The patches [rows * cols, C, P, P] of a picture [C, H, W]."""
    count, height, width = channels.shape
    tall, wide = height // rows, width // cols
    parts = channels.reshape(count, rows, tall, cols, wide).transpose(1, 3, 0, 2, 4)
    return parts.reshape(rows * cols, count, tall, wide)
