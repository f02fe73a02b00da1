"""The message that a child process is started with, and the pipe that it is sent through.

The pipe stays open until one side ends; EOF signals that to the other at once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quire.encodable import NotEncodable, encoded, text_of, to_msgpack
from quire.errors import EngineError, InvalidParameter, LoadError
from quire.hardware.prepared_memory import Preparation

ORPHANED = 3
"""The exit code of a process whose starter has exited."""

_MOST_FDS = 8
_CLOSED_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

LENGTH = struct.Struct("<Q")
"""Length of a frame, which precedes it."""


class ChildStart(msgspec.Struct, kw_only=True):
    """The settings of every child process; `ChildProcess.start` fills them in. `sys_path` is that
    of the starter, and `entries` are those that its program has added to tables of plugins.
    `preparation`: work for the time of its imports. A kind of process
    that speaks to others by a protocol has the version of that as its default.
    """

    protocol_version: int = 0
    sys_path: list[str] = []
    entries: list[tuple[str, str, str]] = []
    log_level: int = 30
    fds: list[int] = []
    preparation: Preparation = Preparation()


M = TypeVar("M", bound=ChildStart)


def encode_start(message: ChildStart) -> bytes:
    """The message as it is sent. Raises LoadError for settings that cannot be sent."""
    try:
        return encoded(_start_encoder.encode, message, is_strict=True)
    except NotEncodable as error:
        raise LoadError(f"The settings cannot be sent to another process: {error}.") from error


def relocated(start: bytes, sys_path: Sequence[str], own: Mapping[str, str]) -> bytes:
    """A start message for a process with modules at `sys_path` and fields of its machine."""
    message = {**msgspec.msgpack.decode(start), **own}
    message["sys_path"] = list(dict.fromkeys([*sys_path, *message["sys_path"]]))
    return to_msgpack(message)


def send_start(pipe: socket.socket, message: ChildStart, fds: Sequence[int] = ()) -> None:
    """Write the message, and descriptors with it. Raises OSError when the process has exited,
    LoadError for settings that cannot be sent.
    """
    data = encode_start(message)
    length = LENGTH.pack(len(data))
    # with the length, the one piece with which the receiver takes descriptors
    sent = socket.send_fds(pipe, [length], list(fds)) if fds else 0
    pipe.sendall(length[sent:] + data)


def receive_start(pipe: socket.socket) -> tuple[bytearray, list[int]]:
    """Wait for a start message and its descriptors. Raises EOFError when the pipe closes."""
    head, fds, *_ = socket.recv_fds(pipe, LENGTH.size, _MOST_FDS, _CLOSED_ON_EXEC)
    if not head:
        raise EOFError("the other end of the pipe is closed")
    head += receive_exactly(pipe, LENGTH.size - len(head))
    return receive_exactly(pipe, LENGTH.unpack(head)[0]), fds


def decode_start(data: bytearray, kind: type[M], fds: Sequence[int] = ()) -> M:
    """The message, a `kind`, with descriptors. Raises EngineError for another version."""
    expected = {field.name: field.default for field in msgspec.structs.fields(kind)}
    # without a type at first: a message of another release may have other fields
    if msgspec.msgpack.decode(data)["protocol_version"] != expected["protocol_version"]:
        raise EngineError("This process and its starter are of different releases; restart both.")
    message = msgspec.msgpack.decode(data, type=kind)
    message.fds = list(fds)
    return message


def preparation_in(data: bytearray) -> Preparation:
    """The work that the start message of any kind of process has for the time of its imports."""
    return msgspec.msgpack.decode(data, type=_Prepared).preparation


class _Prepared(msgspec.Struct):
    preparation: Preparation = Preparation()


def send_last_words(pipe: socket.socket, error: Exception) -> None:
    """Send the front end the error that keeps this process from serving."""
    with contextlib.suppress(OSError):
        pipe.sendall(to_msgpack((type(error).__name__, text_of(error))))


def last_words(pipe: socket.socket) -> tuple[str, str] | None:
    """The class and the text of the error that a process has sent before it ended, if it did."""
    data = bytearray()
    pipe.setblocking(False)
    try:
        while part := pipe.recv(65536):
            data += part
        return msgspec.msgpack.decode(bytes(data), type=tuple[str, str])
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def send_frame(pipe: socket.socket, data: bytes) -> None:
    """Write `data` with its length. Raises OSError when the other end is closed."""
    pipe.sendall(LENGTH.pack(len(data)))
    pipe.sendall(data)


def receive_exactly(pipe: socket.socket, length: int) -> bytearray:
    """Wait for `length` bytes. Raises EOFError when the other end is closed."""
    data = bytearray(length)
    view, place = memoryview(data), 0
    while place < length:
        num = pipe.recv_into(view[place:])
        if not num:
            raise EOFError("the other end of the pipe is closed")
        place += num
    return data


def _named(value: object) -> Any:
    """A class is encoded as its name, by which the core imports it."""
    if isinstance(value, type) and value.__module__ != "__main__" and "<" not in value.__qualname__:
        return f"{value.__module__}:{value.__qualname__}"
    allowed = "another process must be able to import it by name"
    hint = "Put the class into a module of its own, or keep the core in this process."
    raise InvalidParameter("engine argument", value, allowed, hint)


_start_encoder = msgspec.msgpack.Encoder(enc_hook=_named)
