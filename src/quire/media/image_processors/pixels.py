"""Steps on pictures: 8-bit RGB as Pillow has it, until they become float32 channels.

Pictures are resized and cut while they are 8-bit, as the references do; then every channel goes
through a table of 256 values, which has the bits of rescaling and normalizing each pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

FloatArray = npt.NDArray[np.float32]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

NEAREST, LANCZOS, BILINEAR, BICUBIC = range(4)

_STRIP_PIXELS = 2**22
"""Pixels of what is resized in one piece before it is cut."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The values of the 256 levels of each channel: `table` is [3, 256] float32."""

    table: FloatArray

    @classmethod
    def read(
        cls,
        settings: ProcessorSettings,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        do_normalize: bool = True,
        is_bfloat16: bool = False,
    ) -> Levels:
        """The table that the settings ask for; the other arguments are the class's defaults.
        `is_bfloat16`: the arithmetic is that of bfloat16 where both steps are done.
        """
        rescales = settings.flag("do_rescale", True)
        factor = settings.number("rescale_factor", 1 / 255)
        normalizes = settings.flag("do_normalize", do_normalize)
        means = np.array(settings.channels("image_mean", mean), np.float32)[:, None]
        stds = np.array(settings.channels("image_std", std), np.float32)[:, None]
        if normalizes and not stds.all():
            raise settings.refused("image_std", stds.ravel().tolist(), "it has no zeros")
        levels = np.arange(256, dtype=np.float32)[None].repeat(3, axis=0)
        if is_bfloat16 and rescales and normalizes:
            levels = _bfloat16(levels * np.float32(factor))
            levels = _bfloat16(levels - _bfloat16(means))
            return cls(_bfloat16(levels / _bfloat16(stds)))
        if rescales:
            # the reference multiplies in float64 and rounds once
            levels = (levels.astype(np.float64) * factor).astype(np.float32)
        if normalizes:
            levels = (levels - means) / stds
        return cls(levels)

    def channels(self, image: Image) -> FloatArray:
        """A picture [H, W] as [3, H, W]."""
        pixels = np.asarray(image)
        result = np.empty((3, *pixels.shape[:2]), np.float32)
        for channel in range(3):
            np.take(self.table[channel], pixels[..., channel], out=result[channel])
        return result


def _bfloat16(values: FloatArray) -> FloatArray:
    """Rounded to bfloat16 (to nearest, ties to even), as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def resized(image: Image, size: tuple[int, int], resample: int) -> Image:
    """The picture at (height, width)."""
    height, width = size
    # Pillow would copy the same pixels
    if image.size == (width, height):
        return image
    return image.resize((width, height), resample=resample)  # type: ignore[arg-type]


def cut(image: Image, top: int, left: int, height: int, width: int) -> Image:
    """A part of the picture, without what lies beyond its border."""
    right, bottom = min(left + width, image.width), min(top + height, image.height)
    if (left, top, right, bottom) == (0, 0, *image.size):
        return image
    return image.crop((left, top, right, bottom))


def centre_cut(image: Image, height: int, width: int) -> Image:
    """The middle of the picture, with black around it where the picture is smaller."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    if top >= 0 and left >= 0:
        return cut(image, top, left, height, width)
    # The reference centres within a canvas that has the larger of both sides, rounding up.
    full_height, full_width = max(height, image.height), max(width, image.width)
    top += -((image.height - full_height) // 2)
    left += -((image.width - full_width) // 2)
    canvas = _filled(full_height, full_width, (0, 0, 0))
    canvas.paste(image, (-((image.width - full_width) // 2), -((image.height - full_height) // 2)))
    top, left = max(top, 0), max(left, 0)
    return cut(canvas, top, left, height, width)


def resized_middle(
    image: Image, size: tuple[int, int], resample: int, height: int, width: int
) -> Image:
    """`centre_cut` of the resized picture, without ever holding all of a long one.

    Pillow resizes along the rows, then along the columns, and rounds in between; so each of the two
    may be cut at once, in strips.
    """
    full_height, full_width = size
    if full_height * full_width <= _STRIP_PIXELS or full_height < height or full_width < width:
        return centre_cut(resized(image, size, resample), height, width)
    top, left = (full_height - height) // 2, (full_width - width) // 2
    wide = _filled(image.height, width, (0, 0, 0))
    step = max(1, _STRIP_PIXELS // full_width)
    for row in range(0, image.height, step):
        strip = cut(image, row, 0, step, image.width)
        strip = resized(strip, (strip.height, full_width), resample)
        wide.paste(cut(strip, 0, left, strip.height, width), (0, row))
    result = _filled(height, width, (0, 0, 0))
    step = max(1, _STRIP_PIXELS // full_height)
    for column in range(0, width, step):
        strip = cut(wide, 0, column, wide.height, step)
        strip = resized(strip, (full_height, strip.width), resample)
        result.paste(cut(strip, top, 0, height, strip.width), (column, 0))
    return result


def on_canvas(
    image: Image, height: int, width: int, top: int, left: int, colour: tuple[int, int, int]
) -> Image:
    """The picture at a place of a larger one that is filled with `colour`."""
    if (height, width) == (image.height, image.width):
        return image
    canvas = _filled(height, width, colour)
    canvas.paste(image, (left, top))
    return canvas


def tiles(image: Image, rows: int, cols: int, height: int, width: int) -> list[Image]:
    """The picture cut into `rows` x `cols` tiles, row by row."""
    return [
        cut(image, row * height, col * width, height, width)
        for row in range(rows)
        for col in range(cols)
    ]


def patch_rows(channels: FloatArray, patch_size: int) -> FloatArray:
    """[C, H, W] as one row for each patch, row by row: [patches, P * P * C], channels last."""
    num, height, width = channels.shape
    rows, cols = height // patch_size, width // patch_size
    grid = channels.reshape(num, rows, patch_size, cols, patch_size)
    return grid.transpose(1, 3, 2, 4, 0).reshape(rows * cols, -1)


def _filled(height: int, width: int, colour: tuple[int, int, int]) -> Image:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), colour)
