"""Processors of one picture at one size: CLIP, SigLIP, SigLIP 2, LLaVA 1.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.media.image_processors.geometry import Sides, fitting_patches, target_size
from quire.media.image_processors.pixels import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Levels,
    centre_cut,
    on_canvas,
    patch_rows,
    resized,
    resized_middle,
)
from quire.media.image_processors.processor import (
    Arrays,
    PictureLayout,
    refused_shape,
    whole_layout,
)
from quire.media.image_processors.settings import ProcessorSettings, SizeSetting

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PlainProcessor:
    """Resizes, cuts the middle out, and normalizes. `background`: the colour around a picture that
    is made square first; `canvas`: what the result is padded to with zeros, right and below.
    """

    levels: Levels
    resample: int
    size: SizeSetting | None
    crop: Sides | None
    background: tuple[int, int, int] | None = None
    canvas: Sides | None = None

    @classmethod
    def read_with(
        cls,
        settings: ProcessorSettings,
        *,
        size: dict[str, int],
        crop: dict[str, int] | None,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        has_square_padding: bool = False,
    ) -> Self:
        """The processor with the defaults of a class."""
        if settings.flag("use_square_size", False) and "shortest_edge" in size:
            size = {"height": size["shortest_edge"], "width": size["shortest_edge"]}
        wanted = settings.size("size", size, is_square=False)
        if wanted is not None and wanted == SizeSetting(longest_edge=wanted.longest_edge):
            raise settings.refused("size", wanted, "it needs more than a longest edge")
        pads = settings.flag("do_pad", False)
        background = canvas = None
        if pads and has_square_padding:
            means = settings.channels("image_mean", mean)
            # truncated, as the class does it
            background = int(means[0] * 255), int(means[1] * 255), int(means[2] * 255)
        elif pads:
            canvas = _exact(settings, "pad_size")
        crops = settings.flag("do_center_crop", crop is not None)
        return cls(
            levels=Levels.read(settings, mean, std),
            resample=settings.resample(BICUBIC),
            size=wanted if settings.flag("do_resize", True) else None,
            crop=_exact(settings, "crop_size", crop) if crops else None,
            background=background,
            canvas=canvas,
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        full = self._full(height, width)
        size = full if self.crop is None else self.crop
        if self.canvas is not None:
            if size[0] > self.canvas[0] or size[1] > self.canvas[1]:
                raise refused_shape(height, width, "is larger than the model's pad_size")
            size = self.canvas
        return whole_layout(height, width, size)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [3, H, W]."""
        if self.background is not None:
            side = max(image.size)
            top, left = (side - image.height) // 2, (side - image.width) // 2
            image = on_canvas(image, side, side, top, left, self.background)
        if self.size is not None:
            size = target_size(image.height, image.width, self.size)
            if self.crop is not None:
                image = resized_middle(image, size, self.resample, *self.crop)
            else:
                image = resized(image, size, self.resample)
        elif self.crop is not None:
            image = centre_cut(image, *self.crop)
        channels = self.levels.channels(image)
        if channels.shape[1:] != layout.tile:
            padded = np.zeros((3, *layout.tile), np.float32)
            padded[:, : channels.shape[1], : channels.shape[2]] = channels
            channels = padded
        return {"pixel_values": channels}

    def _full(self, height: int, width: int) -> Sides:
        if self.background is not None:
            height = width = max(height, width)
        return (height, width) if self.size is None else target_size(height, width, self.size)


def _exact(
    settings: ProcessorSettings, key: str, default: dict[str, int] | None = None
) -> Sides | None:
    size = settings.size(key, default, is_square=True)
    if size is not None and not size.is_exact:
        raise settings.refused(key, size, "it has a height and a width")
    return None if size is None else (size.height, size.width)


class ClipProcessor(PlainProcessor):
    """CLIPImageProcessor."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        crop = {"height": 224, "width": 224}
        return cls.read_with(
            settings, size={"shortest_edge": 224}, crop=crop, mean=CLIP_MEAN, std=CLIP_STD
        )


class SiglipProcessor(PlainProcessor):
    """SiglipImageProcessor."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        size = {"height": 224, "width": 224}
        return cls.read_with(settings, size=size, crop=None, mean=HALF, std=HALF)


class LlavaProcessor(PlainProcessor):
    """LlavaImageProcessor, whose `do_pad` makes pictures square."""

    __slots__ = ()

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        return cls.read_with(
            settings,
            size={"shortest_edge": 224},
            crop={"height": 224, "width": 224},
            mean=CLIP_MEAN,
            std=CLIP_STD,
            has_square_padding=True,
        )


@dataclass(frozen=True, slots=True)
class Siglip2Processor:
    """Siglip2ImageProcessor: as many patches as fit, in rows that are padded to `max_patches`."""

    levels: Levels
    resample: int
    resizes: bool
    patch_size: int
    max_patches: int

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Self:
        return cls(
            levels=Levels.read(settings, HALF, HALF),
            resample=settings.resample(BILINEAR),
            resizes=settings.flag("do_resize", True),
            patch_size=settings.whole("patch_size", 16),
            max_patches=settings.whole("max_num_patches", 256),
        )

    def layout(self, height: int, width: int) -> PictureLayout:
        """One tile, whose sides are multiples of the patch."""
        patch, size = self.patch_size, (height, width)
        if self.resizes:
            size = fitting_patches(height, width, patch, self.max_patches)
        elif height % patch or width % patch:
            raise refused_shape(height, width, f"is not a multiple of {patch}")
        if size[0] * size[1] > self.max_patches * patch**2:
            raise refused_shape(height, width, f"has more than {self.max_patches} patches")
        return whole_layout(height, width, size)

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """`pixel_values` [max patches, P * P * 3], which of them are there, and the grid."""
        patches = patch_rows(
            self.levels.channels(resized(image, layout.resized, self.resample)), self.patch_size
        )
        values = np.zeros((self.max_patches, patches.shape[1]), np.float32)
        values[: len(patches)] = patches
        mask = np.zeros(self.max_patches, np.int32)
        mask[: len(patches)] = 1
        grid = [side // self.patch_size for side in layout.resized]
        shapes = np.array(grid, np.int64)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}
