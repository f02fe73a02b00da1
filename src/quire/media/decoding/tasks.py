"""Messages to the process that decodes pictures: a task and two files in memory, one with the
picture and one for the arrays that it becomes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.media.image_processors.processor import PictureLayout


class RawPixels(msgspec.Struct, frozen=True):
    """The picture's file has an array as it lies in memory, not an encoded picture."""

    shape: list[int]
    dtype: str


class PictureTask(msgspec.Struct):
    """Decode and process one picture of `num_bytes`. `processor`: the JSON of its processor;
    `background`: the colour under transparent pixels. More than `max_pixels` are not decoded, more
    than `max_values` not made.
    """

    num_bytes: int
    processor: dict[str, Any]
    background: tuple[int, int, int]
    max_pixels: int
    max_values: int
    raw: RawPixels | None = None


class ArrayHeader(msgspec.Struct):
    """One of the arrays that lie one after the other in the file."""

    name: str
    dtype: str
    shape: list[int]


class PictureAnswer(msgspec.Struct, omit_defaults=True):
    """The arrays in the file, or why there are none: `words` that go on after the picture's name,
    or an `error` that does not concern the picture.
    """

    layout: PictureLayout | None = None
    arrays: list[ArrayHeader] = []
    words: str | None = None
    error: str | None = None
