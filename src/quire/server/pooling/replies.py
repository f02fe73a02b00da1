"""Replies with many numbers: written input by input, in a thread, and sent in pieces where they are
long, so that they take neither the event loop nor the memory of a second copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from quire.encodable import to_json
from quire.server.context import RequestName, Server
from quire.server.http.event_stream import PieceStream
from quire.server.http.failures import JSON
from quire.server.openai.replies import Usage
from quire.server.pooling.runs import Pooled

T = TypeVar("T")

_FEW = 1024
"""Numbers that are written in the event loop, in half a millisecond."""
_PIECE = 2**16
_WHOLE = 2**18
"""Numbers of a reply that is sent as a whole, 5 MB as JSON."""


class PoolingReply(msgspec.Struct, kw_only=True):
    """The reply of every route that pools inputs one by one."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Any]
    usage: Usage


class ItemWriter(Generic[T]):
    """The items of a reply as bytes: `write(index, item)`, where item i has `size(i)` numbers."""

    def __init__(
        self, items: Sequence[T], sizes: Sequence[int], write: Callable[[int, T], bytes]
    ) -> None:
        self._items, self._sizes, self._write = items, sizes, write
        self.size = sum(sizes)

    async def pieces(self, head: bytes, between: bytes, tail: bytes) -> AsyncGenerator[bytes]:
        yield head
        start = 0
        while start < len(self._items):
            end, size = start, 0
            # at least one item, also where that alone is more than a piece
            while end < len(self._items) and (end == start or size < _PIECE):
                size += self._sizes[end]
                end += 1
            is_little = self.size <= _FEW
            written = (
                self._written(start, end, between)
                if is_little
                else await asyncio.to_thread(self._written, start, end, between)
            )
            yield (between if start else b"") + written
            start = end
        yield tail

    def _written(self, start: int, end: int, between: bytes) -> bytes:
        return between.join(self._write(i, self._items[i]) for i in range(start, end))


async def sent(
    server: Server,
    writer: ItemWriter[Any],
    frame: tuple[bytes, bytes, bytes],
    media_type: str = JSON,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A reply of the writer's items; `frame`: what comes first, between two of them, and last."""
    pieces = writer.pieces(*frame)
    if writer.size > _WHOLE:
        stall_s = server.limits.reader_timeout_s
        return PieceStream(pieces, media_type=media_type, stall_s=stall_s, headers=headers)
    body = b"".join([piece async for piece in pieces])
    return Response(body, headers=headers, media_type=media_type)


def json_frame(reply: msgspec.Struct, name: str = "data") -> tuple[bytes, bytes, bytes]:
    """A reply whose list `name` is empty, as the frame of the items of that list."""
    written = to_json(reply)
    # names of models and requests come first, but their quotes are escaped in JSON
    head, _, tail = written.partition(f'"{name}":[]'.encode())
    return head + f'"{name}":['.encode(), b",", b"]" + tail


def reply_of(
    server: Server, asked: str | None, name: RequestName, results: Sequence[Pooled]
) -> PoolingReply:
    """A reply without its items; `asked`: the model by the name that the request has."""
    num_tokens = sum(result.num_tokens for result in results)
    return PoolingReply(
        id=name.shown,
        created=name.created,
        model=server.name_of(asked),
        data=[],
        usage=Usage(num_tokens, num_tokens, 0),
    )
