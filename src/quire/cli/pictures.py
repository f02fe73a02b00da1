"""Pictures from files, for questions and prompts."""

from __future__ import annotations

import argparse
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidParameter

FLAG = "--image"
_MOST_BYTES = 100 << 20
_KINDS = {
    b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp",
    b"II*\0": "tiff", b"MM\0*": "tiff",
}  # fmt: skip
"""Beginnings of files -> their media types below image/."""


def add_image_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """The flag `--image`, which may be repeated."""
    parser.add_argument(FLAG, type=Path, action="append", metavar="FILE", default=[], help=what)


def picture_part(file: Path) -> dict[str, Any]:
    """A picture as a part of a message. Raises InvalidParameter for a file that is not one."""
    try:
        with file.open("rb") as stream:
            # one byte more tells a file that is too large, without asking for a size that devices
            # do not have
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidParameter(FLAG, str(file), error.strerror or str(error)) from None
    if len(data) > _MOST_BYTES:
        raise InvalidParameter(FLAG, str(file), f"it has more than {_MOST_BYTES} bytes")
    text = base64.b64encode(data).decode("ascii")
    url = f"data:image/{_kind_of(file, data)};base64,{text}"
    return {"type": "image_url", "image_url": {"url": url}}


def asked_with(question: str, pictures: Sequence[dict[str, Any]]) -> Any:
    """The content of a message: a question about pictures, which come first."""
    return [*pictures, {"type": "text", "text": question}] if pictures else question


def shown(content: Any) -> str:
    """The content of a message as a line shows it."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else "(a picture)" for part in content)


def _kind_of(file: Path, data: bytes) -> str:
    for beginning, kind in _KINDS.items():
        # RIFF is also the beginning of sounds and films
        if data.startswith(beginning) and (kind != "webp" or data[8:12] == b"WEBP"):
            return kind
    allowed = "it is not a PNG, JPEG, WebP, GIF, BMP or TIFF file"
    raise InvalidParameter(FLAG, str(file), allowed)
