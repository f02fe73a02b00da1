"""The message that a child process is started with, and the pipe that it is sent through.

The pipe stays open until one side ends; EOF signals that to the other at once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, TypeVar

import msgspec

from quire.config.plan import EnginePlan
from quire.encodable import NotEncodable, encoded, text_of, to_msgpack
from quire.engine.wire.messages import PROTOCOL_VERSION, EngineZmqAddresses
from quire.errors import EngineError, InvalidParameter, LoadError

LENGTH = struct.Struct("<Q")
"""In front of every frame."""


class ChildStart(msgspec.Struct, kw_only=True):
    """The settings of every child process; `ChildProcess.start` fills them in. `sys_path` is that
    of the starter. `prepared_bytes`: of memory that the process will soon fill.
    """

    protocol_version: int = PROTOCOL_VERSION
    sys_path: list[str] = []
    log_level: int = 30
    prepared_bytes: int = 0


class StartMessage(ChildStart, kw_only=True):
    """Everything a core process must know.

    `socket_folder` is removed by a core that outlives the front end. `server_key`: the public key
    of front ends that are not on this machine.
    """

    plan: EnginePlan
    engine_index: int
    incarnation: int
    addresses: EngineZmqAddresses
    socket_folder: str | None = None
    heartbeat_s: float = 0.5
    is_headless: bool = False
    server_key: bytes | None = None
    data_parallel_size: int = 1


M = TypeVar("M", bound=ChildStart)


def send_start(pipe: socket.socket, message: ChildStart) -> None:
    """Write the message. Raises OSError when the process has exited, LoadError for settings that
    cannot be sent.
    """
    try:
        data = encoded(_start_encoder.encode, message, is_strict=True)
    except NotEncodable as error:
        raise LoadError(f"The settings cannot be sent to another process: {error}.") from error
    send_frame(pipe, data)


def decode_start(data: bytearray, kind: type[M]) -> M:
    """The message, of the struct `kind`. Raises EngineError when it is of another version."""
    if msgspec.msgpack.decode(data)["protocol_version"] != PROTOCOL_VERSION:
        raise EngineError("This process and its starter are of different releases; restart both.")
    return msgspec.msgpack.decode(data, type=kind)


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


def receive_frame(pipe: socket.socket) -> bytearray:
    """Wait for the next frame. Raises EOFError when the other end is closed."""
    return _receive(pipe, LENGTH.unpack(_receive(pipe, LENGTH.size))[0])


def _receive(pipe: socket.socket, length: int) -> bytearray:
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
