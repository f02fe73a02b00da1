"""vLLM's functions for pictures that programs call before they make prompts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.environment import read_environment
from quire.media.decoding.rgb import MAX_PIXELS, as_rgb, opened
from quire.media.fetch.fetcher import GivenPicture, MediaFetcher, Picture
from quire.media.fetch.settings import FetchSettings
from quire.media.io_options import background_of
from quire.media.loader import LoaderThread

if TYPE_CHECKING:
    from PIL.Image import Image

_TYPES = {"jpg": "jpeg"}


def fetch_image(image_url: str, image_io_kwargs: Mapping[str, Any] | None = None) -> Image:
    """The picture of an http, https or data URL, within the bounds of requests; as RGB, or with
    `image_mode` None as it is stored. Raises RequestError.
    """
    kwargs = dict(image_io_kwargs or {})
    keeps_mode = kwargs.get("image_mode", "RGB") is None
    if keeps_mode:
        del kwargs["image_mode"]
    background = background_of({"image": kwargs})
    environment = read_environment().media
    settings = FetchSettings(
        allows_redirects=environment.allows_redirects,
        allows_private=environment.allows_private,
        proxies=environment.proxies,
        max_bytes=environment.max_bytes,
        timeout_s=environment.timeout_s,
    )
    thread = LoaderThread()
    try:
        data = thread.run(_fetched(MediaFetcher(settings), image_url))
    finally:
        thread.close()
    assert isinstance(data, bytes), "a URL has bytes"
    image = opened(data, environment.max_pixels or MAX_PIXELS)
    if not keeps_mode:
        return as_rgb(image, background)
    image.load()
    return image


async def _fetched(fetcher: MediaFetcher, url: str) -> Picture | None:
    budget = fetcher.budget()
    try:
        [found] = await fetcher.fetched([GivenPicture(url=url)], budget)
        return found
    finally:
        budget.release()


def encode_image_base64(
    image: Image, *, image_mode: str | None = "RGB", format: str = "PNG"
) -> str:
    """The file of a picture in base64; in its own mode where `image_mode` is None."""
    if image_mode is not None:
        image = convert_image_mode(image, image_mode)
    file = io.BytesIO()
    image.save(file, format)
    return base64.b64encode(file.getvalue()).decode("ascii")


def encode_image_url(image: Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The picture as a data URL."""
    kind = format.lower()
    data = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{_TYPES.get(kind, kind)};base64,{data}"


def convert_image_mode(
    image: Image, to_mode: str, background_color: tuple[int, int, int] = (255, 255, 255)
) -> Image:
    """A picture in another mode of Pillow's; in RGB the colour behind replaces transparency."""
    if image.mode == to_mode:
        return image
    red, green, blue = background_color
    return as_rgb(image, (red, green, blue)) if to_mode == "RGB" else image.convert(to_mode)
