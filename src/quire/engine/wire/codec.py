"""The frames around messages to cores: a header with the message's number and subject, the routing
id of a core, and the order in which messages are taken.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, cast

import zmq

from quire.processes.array_frames import BadMessage

_POLLIN = int(zmq.POLLIN)
"""As a plain number: to combine the enum's members takes a microsecond each time."""


NO_SUBJECT = -1
"""The subject of a message that is about neither one request nor one call."""


class LostFrames(Exception):
    """A message that was sent has not arrived: sender and receiver no longer know the same."""


class CoreHeader(NamedTuple):
    """The first frame of a message to a core: its kind (the value of an `EngineCoreRequestType`),
    its number among the messages to this incarnation of the core, which count from 1, and its
    subject, which is known even where the rest cannot be decoded: the handle of a request or the id
    of a call.
    """

    kind: bytes
    number: int
    subject: int


_HEADER = struct.Struct("<cQq")


def core_identity(engine_index: int, incarnation: int) -> bytes:
    """The routing id of a core's input socket, which differs between its incarnations."""
    return engine_index.to_bytes(2, "little") + incarnation.to_bytes(4, "little")


def core_header(kind: bytes, number: int, subject: int = NO_SUBJECT) -> bytes:
    """The frame of a `CoreHeader`."""
    return _HEADER.pack(kind, number, subject)


def read_core_header(frame: bytes) -> CoreHeader:
    """The header in a frame. Raises BadMessage for bytes that are not a header."""
    if len(frame) != _HEADER.size:
        raise BadMessage(f"a header has {_HEADER.size} bytes")
    return CoreHeader(*_HEADER.unpack(frame))


class FrameOrder:
    """The receiving end of one sender's messages, whose numbers count from 1."""

    def __init__(self) -> None:
        self.num_taken = 0

    def accept(self, number: int) -> bool:
        """Whether the message with this number is new; False for a repeat, which is to be dropped.

        Raises LostFrames when one before it is missing.
        """
        if number <= self.num_taken:
            return False
        if number > self.num_taken + 1:
            raise LostFrames(f"message {number} came after message {self.num_taken}")
        self.num_taken = number
        return True


def has_input(source: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received now."""
    return bool(cast(int, source.get(zmq.EVENTS)) & _POLLIN)
