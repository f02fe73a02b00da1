"""Messages over the socket pair between two processes, in an event loop.

They are encoded as those over ZeroMQ sockets (codec.py). The system keeps the stream in order and
complete, and EOF signals the peer's death, so there are no sequence numbers and no checks of
delivery.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

from quire.encodable import NotEncodable
from quire.processes.codec import (
    MOST_FRAMES,
    NO_SUBJECT,
    BadMessage,
    Frame,
    MessageDecoder,
    MessageEncoder,
    num_bytes,
)

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<cqI")
"""Head of a message: kind, subject (as in `CoreHeader`), number of frames; their lengths follow."""
MOST_BYTES = 2**31
"""Bytes that a message may have."""

Serve = Callable[[Any], None]
Refuse = Callable[[int, BadMessage], None]
"""(subject, why its message cannot be decoded)"""


class Channel(asyncio.Protocol):
    """One end of such a pair. `kinds` gives, for each first byte, the type of the message and the
    function that handles it; `refuse`, for some of them, the function that ends what a message is
    about which cannot be decoded. `on_lost` is called once, when the other end has closed or has
    sent any other invalid message.

    An exception in a handler closes the channel.
    """

    def __init__(
        self,
        kinds: Mapping[bytes, tuple[Any, Serve]],
        on_lost: Callable[[], None],
        refuse: Mapping[bytes, Refuse] | None = None,
    ) -> None:
        self._kinds = {kind: (MessageDecoder(type), serve) for kind, (type, serve) in kinds.items()}
        self._on_lost = on_lost
        self._refuse = dict(refuse or {})
        self._encoder = MessageEncoder()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, pipe: socket.socket) -> Self:
        """Take the socket over, in the running loop."""
        pipe.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=pipe)
        return self

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        """The number of bytes that the other end has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def encode(self, message: object) -> list[Frame]:
        return self._encoder.encode(message, is_strict=True)

    def send(
        self, kind: bytes, message: object, subject: int = NO_SUBJECT, *, is_strict: bool = False
    ) -> None:
        """Send a message; a closed channel drops it. `is_strict`: see `MessageEncoder.encode`.
        Raises NotEncodable for a message that the other end could not take.
        """
        frames = self._encoder.encode(message, is_strict=is_strict)
        if sum(map(num_bytes, frames)) > MOST_BYTES:
            raise NotEncodable(f"it has more than {MOST_BYTES} bytes")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join([_head(kind, subject, frames), *map(_bytes, frames)]))

    def close(self) -> None:
        """Close when everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        # one waiter that is cancelled must not cancel the future of all
        await asyncio.shield(self._closed)

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own classes

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := self._next()) is not None:
                self._serve(*message)
        except Exception as error:
            logger.error("Failed to handle a message from a related process.", exc_info=error)
            self._buffer.clear()
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
            self._on_lost()

    # messages

    def _serve(self, kind: bytes, subject: int, frames: list[bytes]) -> None:
        if kind not in self._kinds:
            raise BadMessage("unknown kind of message")
        decoder, serve = self._kinds[kind]
        try:
            message = decoder.decode(frames)
        except BadMessage as error:
            if kind not in self._refuse:
                raise
            logger.error("A message from a related process cannot be decoded: %s", error)
            self._refuse[kind](subject, error)
        else:
            serve(message)

    def _next(self) -> tuple[bytes, int, list[bytes]] | None:
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        kind, subject, count = _HEAD.unpack_from(buffer)
        if not 1 <= count <= MOST_FRAMES:
            raise BadMessage("invalid number of frames")
        start = _HEAD.size + 4 * count
        if len(buffer) < start:
            return None
        lengths = struct.unpack_from(f"<{count}I", buffer, _HEAD.size)
        end = start + sum(lengths)
        # before the bytes are waited for: a wrong length must not fill the memory
        if end > MOST_BYTES:
            raise BadMessage("message too large")
        if len(buffer) < end:
            return None
        frames = []
        for length in lengths:
            # copies, since a buffer with views on it cannot be shortened
            frames.append(bytes(buffer[start : start + length]))
            start += length
        del buffer[:end]
        return kind, subject, frames


def _head(kind: bytes, subject: int, frames: list[Frame]) -> bytes:
    lengths = list(map(num_bytes, frames))
    return _HEAD.pack(kind, subject, len(frames)) + struct.pack(f"<{len(lengths)}I", *lengths)


def _bytes(frame: Frame) -> bytes | bytearray | memoryview:
    return frame if isinstance(frame, bytes | bytearray | memoryview) else frame.buffer
