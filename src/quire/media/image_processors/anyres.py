"""LLaVA-NeXT and LLaVA-OneVision: the picture on a canvas of tiles, and an overview before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import (
    Sides,
    best_resolution,
    fitted,
    target_size,
)
from quire.media.image_processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Levels,
    centre_cut,
    on_canvas,
    resized,
    tiles,
)
from quire.media.image_processors.processor import Arrays, PictureLayout
from quire.media.image_processors.settings import ProcessorSettings, SizeSetting

if TYPE_CHECKING:
    from PIL.Image import Image

NEXT_RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION_RESOLUTIONS = tuple(
    (rows * 384, cols * 384) for rows in range(1, 7) for cols in range(1, 7)
)


@dataclass(frozen=True, slots=True)
class AnyResolutionProcessor:
    """Fits the picture into the best of `resolutions`, cuts that into tiles of `tile` pixels, and
    has every tile and the overview go through the same last steps.
    """

    levels: Levels
    resample: int
    resolutions: tuple[Sides, ...]
    tile: int
    overview: Sides
    size: SizeSetting | None
    crop: Sides | None

    @classmethod
    def read_with(
        cls,
        settings: ProcessorSettings,
        *,
        size: dict[str, int],
        crop: dict[str, int] | None,
        resolutions: Sequence[Sides],
    ) -> Self:
        """The processor with the defaults of a class."""
        settings.flag("do_pad", True)  # between the pictures of a batch
        wanted = settings.size("size", size, is_square=False)
        assert wanted is not None, "the class has a default"
        if not wanted.is_exact and not wanted.shortest_edge:
            raise settings.refused("size", wanted, "it needs two sides or a shortest edge")
        cuts = settings.size("crop_size", crop, is_square=True)
        if cuts is not None and not cuts.is_exact:
            raise settings.refused("crop_size", cuts, "it has a height and a width")
        crops = settings.flag("do_center_crop", crop is not None)
        if crops and cuts is None:
            raise settings.refused("do_center_crop", True, "crop_size is missing")
        edge = wanted.shortest_edge
        return cls(
            levels=Levels.read(settings, CLIP_MEAN, CLIP_STD),
            resample=settings.resample(BICUBIC),
            resolutions=_pairs(settings, "image_grid_pinpoints", resolutions),
            tile=cuts.height if cuts is not None else wanted.height or edge,
            overview=(wanted.height, wanted.width) if wanted.is_exact else (edge, edge),
            size=wanted if settings.flag("do_resize", True) else None,
            crop=(cuts.height, cuts.width) if crops and cuts is not None else None,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """The grid of the canvas; tiles have the size of the last steps."""
        tall, wide = best_resolution(height, width, self.resolutions)
        rows, cols = -(-tall // self.tile), -(-wide // self.tile)
        size = self._last_size(*self.overview)
        return PictureLayout(height, width, self.overview, size, rows, cols, 1 + rows * cols)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [tiles, 3, H, W], the overview first, and `image_sizes`."""
        target = best_resolution(image.height, image.width, self.resolutions)
        inner = resized(image, fitted(image.height, image.width, target), self.resample)
        top, left = (target[0] - inner.height) // 2, (target[1] - inner.width) // 2
        canvas = on_canvas(inner, *target, top, left, (0, 0, 0))
        parts = [resized(image, self.overview, self.resample)]
        parts += tiles(canvas, layout.rows, layout.cols, self.tile, self.tile)
        values = np.stack([self.levels.channels(self._finished(part)) for part in parts])
        sizes = np.array([layout.height, layout.width], np.int64)
        return {"pixel_values": values, "image_sizes": sizes}

    def _finished(self, part: Image) -> Image:
        if self.size is not None:
            part = resized(part, target_size(part.height, part.width, self.size), self.resample)
        return part if self.crop is None else centre_cut(part, *self.crop)

    def _last_size(self, height: int, width: int) -> Sides:
        if self.crop is not None:
            return self.crop
        return (height, width) if self.size is None else target_size(height, width, self.size)


def _pairs(settings: ProcessorSettings, key: str, default: Sequence[Sides]) -> tuple[Sides, ...]:
    pairs = settings.value(key, default)
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(side, int) and 0 < side < 2**16 for side in pair)
        for pair in pairs
    ):
        raise settings.refused(key, pairs, "it is a list of heights and widths")
    return tuple((tall, wide) for tall, wide in pairs)


class LlavaNextProcessor(AnyResolutionProcessor):
    """LlavaNextImageProcessor."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        crop = {"height": 224, "width": 224}
        return cls.read_with(
            settings, size={"shortest_edge": 224}, crop=crop, resolutions=NEXT_RESOLUTIONS
        )


class LlavaOnevisionProcessor(AnyResolutionProcessor):
    """LlavaOnevisionImageProcessor."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        size = {"height": 384, "width": 384}
        return cls.read_with(settings, size=size, crop=None, resolutions=ONEVISION_RESOLUTIONS)
