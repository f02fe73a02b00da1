"""Names of pictures by their content. Equal names mean equal inputs of the encoder.

Every field is tagged and has its length in front, so that no two pictures have one text to hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.encodable import to_json

DIGEST_BYTES = 32

_RUN = os.urandom(16)
"""Part of names that callers give: elsewhere the same id may be of another picture."""
_ALGORITHMS = {"sha256": hashlib.sha256, "sha512": hashlib.sha512}


class ContentHash:
    """Hashes tagged fields. `algorithm` is sha256 or sha512; names have 32 bytes of either."""

    def __init__(self, kind: str, algorithm: str = "sha256") -> None:
        self._hash = _ALGORITHMS[algorithm]()
        # a number to raise when the meaning of a name changes: files outlive releases
        self.add("quire", b"1")
        self.add("kind", kind.encode())

    def add(self, tag: str, value: bytes | memoryview) -> None:
        for part in (tag.encode(), value):
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)

    def add_array(self, tag: str, array: npt.NDArray[Any]) -> None:
        """Add the type, the shape and the numbers of an array."""
        self.add("dtype", array.dtype.str.encode())
        # one byte order on all machines, which may share files of K/V
        self.add("shape", np.array(array.shape, "<i8").tobytes())
        self.add(tag, array.tobytes())

    def digest(self) -> bytes:
        return self._hash.digest()[:DIGEST_BYTES]


def picture_digest(
    picture: bytes | npt.NDArray[Any],
    processor: Mapping[str, Any],
    *,
    background: tuple[int, int, int] = (255, 255, 255),
    algorithm: str = "sha256",
) -> bytes:
    """The name of a picture as it came: its bytes, or the type, shape and numbers of an array; with
    all options that decide what becomes of it.
    """
    content = ContentHash("image", algorithm)
    if isinstance(picture, np.ndarray):
        content.add_array("pixels", picture)
    else:
        content.add("bytes", picture)
    _add_options(content, processor, background)
    return content.digest()


def part_digest(digest: bytes, index: int) -> bytes:
    """The name of one of the parts of a picture that are encoded on their own."""
    content = ContentHash("part")
    content.add("whole", digest)
    content.add("index", index.to_bytes(8, "little"))
    return content.digest()


def uuid_digest(
    uuid: str,
    processor: Mapping[str, Any],
    *,
    scope: str | None = None,
    background: tuple[int, int, int] = (255, 255, 255),
) -> bytes:
    """The name that a caller's id stands for in this process, with the options. `scope`: whose id
    it is. A server sets it to the caller and the cache salt, so that nobody reads what another one
    has named; a program that embeds the engine is trusted with its ids.
    """
    content = ContentHash("uuid")
    content.add("run", _RUN)
    # no scope differs from an empty one
    content.add("scope", b"" if scope is None else b"+" + scope.encode())
    content.add("uuid", uuid.encode())
    _add_options(content, processor, background)
    return content.digest()


def _add_options(
    content: ContentHash, processor: Mapping[str, Any], background: tuple[int, int, int]
) -> None:
    content.add("background", bytes(background))
    content.add("processor", to_json(_in_order(processor)))


def _in_order(value: Any) -> Any:
    """The value with the keys of all objects sorted."""
    if isinstance(value, Mapping):
        return {key: _in_order(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_in_order(each) for each in value]
    return value
