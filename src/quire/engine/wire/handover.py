"""The messages of a stream that goes on at another server, and how they lie in a body.

A body is messages, each as the number of its frames, then each frame after its size. A message of
no frames says that the sender is alive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec

from quire.engine.wire.messages import EngineCoreRequest
from quire.processes.codec import BadMessage, Frame, buffer_of, num_bytes

VERSION = 1
BEAT_S = 1.0
"""Seconds between two signs of life."""
_SIZE = struct.Struct("<I")
_MOST_FRAMES = 1 << 11
_MOST_BYTES = 1 << 30
ALIVE = _SIZE.pack(0)


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Names of all that the tokens of a server depend on. `root`: as of K/V that leaves an engine;
    `model`: the weights' contents and how tokens are drawn. "": it is not known.
    """

    root: str = ""
    model: str = ""


class HandedStream(msgspec.Struct, array_like=True):
    """A stream to go on with: its request and tokens; None: the question whether one may come."""

    version: int
    origin: Origin
    request: EngineCoreRequest | None = None


def packed(frames: Sequence[Frame]) -> bytes:
    """A message in a body."""
    parts = [_SIZE.pack(len(frames))]
    for frame in frames:
        parts += [_SIZE.pack(num_bytes(frame)), bytes(buffer_of(frame))]
    return b"".join(parts)


class Unpacker:
    """Takes messages out of a body that comes in parts."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """The frames of the messages that are whole now. Raises BadMessage."""
        self._buffer += data
        while (found := self._message()) is not None:
            frames, end = found
            del self._buffer[:end]
            yield frames

    def _message(self) -> tuple[list[bytes], int] | None:
        at = _SIZE.size
        if len(self._buffer) < at:
            return None
        (count,) = _SIZE.unpack_from(self._buffer)
        if count > _MOST_FRAMES:
            raise BadMessage(f"a message has at most {_MOST_FRAMES} frames")
        frames = []
        for _ in range(count):
            if len(self._buffer) < at + _SIZE.size:
                return None
            (size,) = _SIZE.unpack_from(self._buffer, at)
            if size > _MOST_BYTES:
                raise BadMessage(f"a frame has at most {_MOST_BYTES} bytes")
            at += _SIZE.size
            if len(self._buffer) < at + size:
                return None
            frames.append(bytes(self._buffer[at : at + size]))
            at += size
        return frames, at
