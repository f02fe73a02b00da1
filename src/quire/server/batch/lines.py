"""The input of a batch: lines of a file, each a request that is checked by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.errors import InvalidParameter

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/score", "/rerank"),
)
"""The routes that a batch may call."""

_BOM = b"\xef\xbb\xbf"
_PIECE_BYTES = 1 << 20
_MAX_SHOWN = 200


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request as a line has it; `body` goes to the app as it was written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class InvalidLine(Exception):
    """A line that is not a request; its text says why. `custom_id` is the line's, if it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank, by its number from 1; `data` None: it was larger than is read."""

    number: int
    digest: str
    data: bytes | None

    @property
    def id(self) -> str:
        """Name of its result: place and content, so that a result is never another's."""
        return f"batch_req_{self.number}_{self.digest}"


def check_input(file: Path) -> None:
    """Raise InvalidParameter for what is not a file that can be read twice."""
    if not file.is_file():
        hint = "Download it first." if ":/" in str(file) else ""
        raise InvalidParameter("--input-file", str(file), "it must be a file", hint)


def read_lines(file: Path, max_bytes: int) -> Iterator[Line]:
    """The lines of `file` in order, without the blank ones; O(max_bytes) memory."""
    with file.open("rb") as stream:
        # editors of Windows put one before UTF-8 texts, and JSON has none (RFC 8259, 8.1)
        if stream.read(len(_BOM)) != _BOM:
            stream.seek(0)
        number = 0
        while True:
            number += 1
            size, digest, data = _read_line(stream, max_bytes)
            if not size:
                return
            if data is None or data:
                yield Line(number, digest, data)


def _read_line(stream: BinaryIO, max_bytes: int) -> tuple[int, str, bytes | None]:
    """Size in bytes of the next line (0: end of file), its digest, its text without line end."""
    size, digest, pieces = 0, hashlib.sha256(), []
    # in pieces, since a line may be larger than memory
    while piece := stream.readline(_PIECE_BYTES):
        size += len(piece)
        # without the line's end: a file that was converted between systems keeps its results
        digest.update(piece.rstrip(b"\r\n"))
        if size <= max_bytes:
            pieces.append(piece)
        if piece.endswith(b"\n"):
            break
    data = b"".join(pieces).strip() if size <= max_bytes else None
    return size, digest.hexdigest()[:16], data


class LineChecker:
    """Decodes and checks lines; a `custom_id` belongs to the first line that has it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._names: dict[str, int] = {}

    def request(self, line: Line) -> BatchRequest:
        """The line's request. Raises InvalidLine."""
        if line.data is None:
            raise InvalidLine(
                f"The line is larger than {self._max_bytes} bytes (--max-body-bytes)."
            )
        request = _decode(line.data)
        first = self._names.setdefault(request.custom_id, line.number)
        if first != line.number:
            text = f"custom_id {_shown(request.custom_id)} is that of line {first} already."
            raise InvalidLine(text, request.custom_id)
        _check(request)
        return request


def _decode(data: bytes) -> BatchRequest:
    try:
        return msgspec.json.decode(data, type=BatchRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = f"The line is not a request: {str(error)[:_MAX_SHOWN]}."
        raise InvalidLine(text, _name_of(data)) from None


class _Named(msgspec.Struct):
    custom_id: Any = None


def _name_of(data: bytes) -> str | None:
    """The name of a line that is otherwise wrong."""
    try:
        name = msgspec.json.decode(data, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


class _DeliveryFields(msgspec.Struct):
    stream: Any = None
    background: Any = None
    encoding_format: Any = None


def _check(request: BatchRequest) -> None:
    """Checks the part that is the same for every body; the app judges the rest."""
    if request.method != "POST":
        raise InvalidLine(f"method {_shown(request.method)} is not POST.", request.custom_id)
    if request.url not in URLS:
        text = f"url {_shown(request.url)} is not served in a batch: choose of {', '.join(URLS)}."
        raise InvalidLine(text, request.custom_id)
    try:
        given = msgspec.json.decode(request.body, type=_DeliveryFields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    for name in ("stream", "background"):
        if getattr(given, name) is True:
            text = f"{name} is for callers who are connected; leave it out in a batch."
            raise InvalidLine(text, request.custom_id)
    if given.encoding_format in ("bytes", "bytes_only"):
        text = f"encoding_format {given.encoding_format} is not JSON, as results are: use base64."
        raise InvalidLine(text, request.custom_id)


def _shown(text: str) -> str:
    return repr(text[:_MAX_SHOWN])
