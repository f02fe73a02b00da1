"""Encoded pictures to 8-bit RGB. Runs where a hostile file can do no harm (decode_process.py).

Errors say what is wrong in our words: texts of Pillow may hold addresses of memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.media.faults import MediaFault

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are decoded; Pillow knows 40 more, some of which start programs."""

MAX_PIXELS = 178_956_970
"""Pixels of a picture, by its header, unless set otherwise."""

_PLUGINS = ("Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff")
_ORIENTATION = 0x0112
_TURNED = frozenset({5, 6, 7, 8})
"""Orientations of EXIF that exchange height and width."""

INSTALL = "Install Pillow for pictures: pip install 'quire[media]'."


def check_pillow() -> None:
    """Raise RequestError where Pillow is missing, without importing it."""
    if importlib.util.find_spec("PIL") is None:
        raise RequestError(INSTALL, parameter="image")


def load_pillow() -> None:
    """Import Pillow and the formats that are read. Raises RequestError where it is missing."""
    try:
        for name in _PLUGINS:
            importlib.import_module(f"PIL.{name}ImagePlugin")
    except ImportError:
        raise RequestError(INSTALL, parameter="image") from None


def opened(data: bytes | memoryview, max_pixels: int) -> Image:
    """The picture by its header alone. Raises MediaFault for what is not one, or is too large."""
    from PIL import Image as pillow

    load_pillow()
    pillow.MAX_IMAGE_PIXELS = None  # the check below has its own words and its own bound
    with _plain_errors("is not a picture, or its beginning is damaged"):
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    if not image.width or not image.height:
        raise MediaFault("has no pixels")
    if image.width * image.height > max_pixels:
        raise MediaFault(
            f"has {image.width} x {image.height} pixels, and at most {max_pixels} are decoded"
        )
    return image


def upright_size(image: Image) -> tuple[int, int]:
    """(height, width) as EXIF turns it, without decoding. A PNG may have EXIF after its pixels, for
    which Pillow would decode them: then it is only known once that is done.
    """
    is_turned = False
    if image.format != "PNG" or "exif" in image.info:
        with _plain_errors("has damaged metadata"):
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (image.width, image.height) if is_turned else (image.height, image.width)


def as_rgb(image: Image, background: tuple[int, int, int] = (255, 255, 255)) -> Image:
    """The first frame, upright and as RGB, with `background` behind what is transparent."""
    from PIL import Image as pillow
    from PIL import ImageOps

    with _plain_errors("is cut off or damaged"):
        # apart from what follows, so that the words fit: a file that is cut off fails here
        image.load()
    with _plain_errors("has damaged metadata"):
        image = ImageOps.exif_transpose(image)
    with _plain_errors("has a form of pixels that cannot be shown as RGB"):
        # RGB may have one colour that stands for transparency
        if image.mode == "RGB" and image.info.get("transparency") is None:
            return image
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            under = pillow.new("RGBA", image.size, (*background, 255))
            image = pillow.alpha_composite(under, image)
        return image.convert("RGB")


def from_array(array: npt.NDArray[Any]) -> Image:
    """A picture of an array: [H, W, C] if the last axis is 1, 3 or 4, else [C, H, W]; or [H, W].
    Numbers that are not whole lie in [0, 1].
    """
    from PIL import Image as pillow

    load_pillow()
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise MediaFault(f"has {array.ndim} axes; a picture has 3")
    if array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] not in (1, 3, 4):
        raise MediaFault("has no axis of 1, 3 or 4 channels")
    if not array.size:
        raise MediaFault("has no pixels")
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise MediaFault("has numbers outside of [0, 1]")
        array = (array.astype(np.float64) * 255).astype(np.uint8)
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype.kind not in "iu":
        raise MediaFault(f"has elements of type {array.dtype}")
    elif array.dtype != np.uint8:
        if array.min() < 0 or array.max() > 255:
            raise MediaFault("has numbers outside of 0 to 255")
        array = array.astype(np.uint8)
    pixels = np.ascontiguousarray(array)
    return pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


@contextmanager
def _plain_errors(words: str) -> Iterator[None]:
    """Says `words` instead of what Pillow says."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata, and nobody reads it here
            warnings.simplefilter("ignore")
            yield
    except MediaFault:
        raise
    except MemoryError:
        raise MediaFault("takes too much memory to decode") from None
    except _DAMAGE:
        raise MediaFault(words) from None


_DAMAGE: tuple[type[Exception], ...] = (
    *(OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error, OverflowError),
    *(KeyError, IndexError, AttributeError, ZeroDivisionError, NotImplementedError),
    *(RuntimeError, AssertionError),
)
"""Exceptions of Pillow for damaged files: its plugins check little themselves."""
