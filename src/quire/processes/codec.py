"""Messages as frames: MessagePack, then the memory of large arrays; those to cores have a header
with the message's number and subject.

Nothing here can run code that a sender chose: the decoder makes the message types that it is made
for, plain values and numeric arrays, and refuses all else with `BadMessage`. The exception are
functions where the environment allows them (functions.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, get_args

import msgspec
import numpy as np

from quire.encodable import NotEncodable, encoded
from quire.processes.functions import FUNCTION, pack_function, unpack_function

if TYPE_CHECKING:
    import zmq

Frame: TypeAlias = "bytes | bytearray | memoryview | zmq.Frame"
T = TypeVar("T")

INLINE_BYTES = 256
"""Smaller arrays are part of the first frame: a frame of its own costs more than the copy."""
MOST_FRAMES = 1024
"""Frames that a message may have; further arrays are part of the first one."""

_ARRAY = 3
_TORCH_TYPE = 5
"""The MessagePack extension codes of an array, and of a type of torch, which goes by its name."""

_DTYPES = frozenset(
    np.dtype(name).str
    for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
                 "float16", "float32", "float64")
)  # fmt: skip


class BadMessage(ValueError):
    """Frames that are not a message of the expected type."""


class _ArrayHeader(msgspec.Struct, array_like=True, gc=False):
    """`place` is the index of the frame that holds the memory, or the memory itself."""

    dtype: str
    shape: tuple[int, ...]
    place: int | bytes


class MessageEncoder:
    """Turns messages into frames. For one thread.

    Frames of large arrays are the arrays' own memory, which must not change until they are sent.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._aside: list[Frame] = []

    def encode(self, message: Any, *, is_strict: bool = False) -> list[Frame]:
        """The frames of a message, with plain texts (encodable.py). `is_strict`: other texts
        are refused. Raises NotEncodable for a message that cannot be encoded.
        """
        first = encoded(self._first_frame, message, is_strict=is_strict)
        return [first, *self._aside] if self._aside else [first]

    def _first_frame(self, message: Any) -> bytes:
        self._aside = []
        return self._encoder.encode(message)

    def _hook(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return msgspec.msgpack.Ext(_ARRAY, self._header(value))
        if isinstance(value, np.generic):
            return value.item()
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind == "torch.dtype":
            name = str(value).removeprefix("torch.")
            return msgspec.msgpack.Ext(_TORCH_TYPE, name.encode())
        if callable(value) and not isinstance(value, type):
            return msgspec.msgpack.Ext(FUNCTION, pack_function(value))
        raise NotEncodable(f"it has a {kind}: give plain values and numpy arrays")

    def _header(self, array: np.ndarray[Any, Any]) -> bytes:
        if array.dtype.str not in _DTYPES:
            raise NotEncodable(f"it has an array of {array.dtype}")
        data = np.ascontiguousarray(array)
        place: int | bytes
        if data.nbytes < INLINE_BYTES or len(self._aside) >= MOST_FRAMES - 1:
            place = data.tobytes()
        else:
            self._aside.append(data.reshape(-1).view(np.uint8).data)
            place = len(self._aside)
        return msgspec.msgpack.encode(_ArrayHeader(array.dtype.str, array.shape, place))


class MessageDecoder(Generic[T]):
    """Turns frames into messages of one type. For one thread.

    Arrays are read-only views of the frames' memory, which they keep alive.
    """

    def __init__(self, kind: type[T], *, takes_functions: bool = True) -> None:
        """`takes_functions`: if the environment allows; False for what comes from outside."""
        self._takes_functions = takes_functions
        self._decoder = msgspec.msgpack.Decoder(
            kind, ext_hook=self._extension, dec_hook=_checked, strict=True
        )
        self._header = msgspec.msgpack.Decoder(_ArrayHeader)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """The message. Raises BadMessage for anything else, whatever the bytes are."""
        if not frames:
            raise BadMessage("a message has at least one frame")
        self._frames = frames
        try:
            return self._decoder.decode(buffer_of(frames[0]))
        except Exception as error:  # the checks of params, too, which may raise whatever they meet
            raise BadMessage(f"{type(error).__name__}: {error}") from error
        finally:
            self._frames = ()

    def _extension(self, code: int, data: memoryview) -> object:
        if code == FUNCTION and self._takes_functions:
            return unpack_function(bytes(data))
        if code == _TORCH_TYPE:
            return _torch_type(bytes(data))
        if code != _ARRAY:
            raise BadMessage(f"unknown extension {code}")
        return self._array(data)

    def _array(self, data: memoryview) -> np.ndarray[Any, Any]:
        header = self._header.decode(data)
        if header.dtype not in _DTYPES:
            raise BadMessage(f"unknown array type {header.dtype[:20]!r}")
        dtype = np.dtype(header.dtype)
        memory = self._memory(header.place)
        if len(header.shape) > 8 or any(size < 0 for size in header.shape):
            raise BadMessage("an array has an invalid shape")
        if math.prod(header.shape) * dtype.itemsize != len(memory):
            raise BadMessage("an array's memory does not have the size of its shape")
        array = np.frombuffer(memory, dtype=dtype).reshape(header.shape)
        array.flags.writeable = False
        return array

    def _memory(self, place: int | bytes) -> bytes | memoryview:
        if isinstance(place, bytes):
            return place
        if not 1 <= place < len(self._frames):
            raise BadMessage(f"an array refers to frame {place}, which does not exist")
        return buffer_of(self._frames[place])


def _torch_type(name: bytes) -> object:
    torch = import_module("torch")  # front ends that get none do without it
    found = getattr(torch, name.decode(), None)
    if not isinstance(found, torch.dtype):
        raise BadMessage(f"unknown type of torch {name[:20]!r}")
    return found


def num_bytes(frame: Frame) -> int:
    """The size of a frame."""
    return memoryview(buffer_of(frame)).nbytes


def buffer_of(frame: Frame) -> bytes | memoryview:
    """The memory of a frame."""
    if isinstance(frame, bytes):
        return frame
    if isinstance(frame, bytearray | memoryview):
        return memoryview(frame)
    view: memoryview = frame.buffer
    return view


def _checked(kind: Any, value: object) -> object:
    """Check an array against the dtype of the message type."""
    if not isinstance(value, np.ndarray):
        raise BadMessage("an array was expected")
    wanted = get_args(get_args(kind)[1])[0]
    if value.dtype != np.dtype(wanted):
        raise BadMessage(f"an array of {wanted.__name__} was expected, not {value.dtype}")
    return value


_EVENTS, _POLLIN = 15, 1
"""`zmq.EVENTS` and `zmq.POLLIN` as plain numbers: to combine the enum's members takes a microsecond
each time, and whoever has no sockets does without that module.
"""


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
    return bool(cast(int, source.get(_EVENTS)) & _POLLIN)
