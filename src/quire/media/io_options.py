"""Options for decoding files of media (`media_io_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidParameter, InvalidType, UnknownParameter


def background_of(media_io_kwargs: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """The colour under transparent pixels that `media_io_kwargs["image"]` asks for; white."""
    given = (media_io_kwargs or {}).get("image") or {}
    if not isinstance(given, Mapping):
        raise InvalidType("media_io_kwargs.image", given, "it is a dict")
    options = dict(given)
    mode = options.pop("image_mode", None) or "RGB"
    if mode != "RGB":
        raise InvalidParameter("media_io_kwargs.image_mode", mode, "pictures become RGB")
    colour = options.pop("rgba_background_color", None)
    if options:
        allowed = "pictures have image_mode and rgba_background_color"
        raise UnknownParameter(f"media_io_kwargs.image.{min(options)}", allowed)
    if colour is None:
        return 255, 255, 255
    if (
        not isinstance(colour, list | tuple)
        or len(colour) != 3
        or not all(type(each) is int and 0 <= each <= 255 for each in colour)
    ):
        allowed = "it is three whole numbers from 0 to 255"
        raise InvalidParameter("media_io_kwargs.rgba_background_color", colour, allowed)
    red, green, blue = colour
    return red, green, blue
