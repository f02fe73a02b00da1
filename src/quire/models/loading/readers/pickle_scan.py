"""Reads a pickle of torch.save as data, before torch unpickles it.

torch's restricted unpickler runs no code, but it builds what it is asked for: a byte array of any
size, tuples whose hash takes longer than anybody waits or more stack than there is, tensors that
reach beyond their storage's end, for which it makes the storage larger. So the opcodes are followed
here with values that cost nothing, and whatever a dict of tensors does not need is refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, cast

from quire.errors import CorruptCheckpoint, LoadError

_MOST_OPCODES = 4_000_000
"""Most opcodes of a pickle, some forty for each of 100,000 tensors."""
_LONGEST_SHAPE = 8
"""Longest shape that stands in several places."""
_DEEPEST_TUPLE = 4
"""The arguments of a tensor, with its shape in them, have two levels."""
_ORDERED_DICT = "collections.OrderedDict"
_NEEDED = re.compile(
    rf"{re.escape(_ORDERED_DICT)}"
    r"|torch\._utils\._rebuild_(?:tensor(?:_v[23])?|parameter(?:_with_state)?)"
    # made, and then refused by name
    r"|torch\._utils\._rebuild_(?:sparse_tensor|meta_tensor_no_storage)"
    r"|torch\.serialization\._get_layout|torch\.Size|torch\.device"
)
_STORAGES = {"torch.storage.UntypedStorage": 1} | {
    f"torch.{home}{kind}Storage": size
    for home in ("", "cuda.")
    for size, kinds in {
        1: ("Bool", "Byte", "Char"),
        2: ("BFloat16", "Half", "Short"),
        4: ("Float", "Int"),
        8: ("ComplexFloat", "Double", "Long"),
        16: ("ComplexDouble",),
    }.items()
    for kind in kinds
}
"""Name of a class -> the bytes of each of its values."""
_DTYPES = {
    f"torch.{name}": size
    for size, names in {
        1: (
            *("bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4", "bit"),
            *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
            *("float8_e8m0fnu", "float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8"),
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        ),
        2: ("bfloat16", "float16", "half", "int16", "short", "uint16", "bits16"),
        4: ("float32", "float", "int32", "int", "uint32", "qint32", "complex32", "chalf"),
        8: ("float64", "double", "int64", "long", "uint64", "complex64", "cfloat"),
        16: ("complex128", "cdouble"),
    }.items()
    for name in names
}
"""torch's types -> bytes of a value; a table, since servers read tensors without torch."""
_TENSORS = tuple(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
"""Functions of a storage, an offset, a shape and strides; the last one also of a type."""


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """Memory that a pickle names: the key of its record, the class of its values, and its bytes."""

    key: str
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor within a storage: its first value, shape and strides count values."""

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScannedPickle:
    """A pickle's storages by key, and its value: a list, or a tensor of its storage's type."""

    storages: Mapping[str, PickledStorage]
    listed: list[Any] | None
    tensor: PickledTensor | None = None


@dataclass(frozen=True, slots=True)
class _Named:
    """A class or function that is asked for."""

    name: str


_MARK, _ORDERED, _OTHER = object(), object(), object()
"""The beginning of a list of values, an OrderedDict, and a value that does not matter."""


def scan_pickle(file: Path, stream: BufferedIOBase | IO[bytes], most_bytes: int) -> ScannedPickle:
    """Contents of the pickle at whose beginning `stream` is; it is left at its end.

    Raises CorruptCheckpoint, which names `file`, for a pickle with what a dict of tensors does not
    need, with tensors that are not within their storages, or of more than `most_bytes`.
    """
    scan = _Scan(file)
    bounded = cast("IO[bytes]", _Bounded(stream, most_bytes))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(bounded)):
            if count >= _MOST_OPCODES:
                raise _broken(file, f"its pickle has more than {_MOST_OPCODES} instructions")
            scan.follow(opcode.name, argument)
    except LoadError:
        raise
    except (ValueError, IndexError, KeyError, EOFError) as error:
        raise _broken(file, str(error) or type(error).__name__) from error
    return ScannedPickle(scan.storages, scan.listed, scan.tensor)


class _Scan:
    """The stack and the memo of a pickle machine, with tuples, lists, numbers, texts, names and
    storages as they are and `_OTHER` for nearly all else.
    """

    def __init__(self, file: Path) -> None:
        self.storages: dict[str, PickledStorage] = {}
        self.listed: list[Any] | None = None
        self.tensor: PickledTensor | None = None
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Do what an opcode does. Raises CorruptCheckpoint for one that is not needed."""
        if name in _CONSTANTS:
            self._stack.append(argument if isinstance(argument, int | str) else _OTHER)
        elif name in _SMALL_TUPLES:
            self._append_tuple(self._popped(_SMALL_TUPLES[name]))
        elif name in _METHODS:
            _METHODS[name](self, argument)
        elif name != "PROTO":
            raise CorruptCheckpoint(
                f"{self._file} has the pickle instruction {name}, which torch.save does not write "
                "in its default protocol. Use a safetensors version of the model."
            )

    def _popped(self, count: int) -> list[Any]:
        at = len(self._stack) - count
        if at < 0:
            raise IndexError("a value is taken from an empty stack")
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _to_mark(self) -> list[Any]:
        found: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def none(self, _: Any) -> None:
        self._stack.append(None)

    def empty_list(self, _: Any) -> None:
        self._stack.append([])

    def append(self, _: Any) -> None:
        self._extend(self._popped(1))

    def appends(self, _: Any) -> None:
        self._extend(self._to_mark())

    def _extend(self, values: Sequence[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise _broken(self._file, "its pickle extends what is not a list")
        self._stack[-1].extend(values)

    def set_item(self, _: Any) -> None:
        self._popped(2)

    def set_items(self, _: Any) -> None:
        self._to_mark()

    def tuple_to_mark(self, _: Any) -> None:
        self._append_tuple(self._to_mark())

    def _append_tuple(self, values: Sequence[Any]) -> None:
        made = tuple(values)
        if not _is_flat(made, _DEEPEST_TUPLE):
            raise _broken(self._file, "its pickle has a tuple in a tuple, and so on")
        self._stack.append(made)

    def stop(self, _: Any) -> None:
        value = self._stack[-1]
        if isinstance(value, list):
            self.listed = value
        elif isinstance(value, PickledTensor):
            self.tensor = value

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        value = self._memo[index]
        # each of a row of tuples that hold the one before twice doubles the time of the last one's
        # hash
        if isinstance(value, tuple) and not _is_shape(value):
            raise _broken(self._file, "its pickle has one tuple in several places")
        self._stack.append(value)

    def name(self, argument: str) -> None:
        name = argument.replace(" ", ".")
        if name.startswith("torchao."):
            raise CorruptCheckpoint(
                f"{self._file} has tensors of a class of torchao's ({name[:200]}), which only "
                "torchao unpickles. Save the model again: transformers 5 with torchao 0.13 or "
                "later writes safetensors, which are read."
            )
        if not (name in _STORAGES or _NEEDED.fullmatch(name) or name in _DTYPES):
            raise CorruptCheckpoint(
                f"{self._file} asks for {name[:200]} while it is unpickled, which could run any "
                "code, so it is not read. Use a safetensors version of the model."
            )
        self._stack.append(_Named(name))

    def storage(self, _: Any) -> None:
        """Make a storage of ('storage', class, key, device, length) and, in old files, None."""
        stated = self._stack.pop()
        match stated if isinstance(stated, tuple) else ():
            case ("storage", _Named(kind), str(key), str(), int(count)) | (
                "storage",
                _Named(kind),
                str(key),
                str(),
                int(count),
                None,
            ) if kind in _STORAGES and count >= 0:
                found = PickledStorage(key, kind, count * _STORAGES[kind])
            case _:
                raise _broken(self._file, "its pickle names a storage in another way than torch")
        if self.storages.setdefault(key, found) != found:
            raise _broken(self._file, f"its pickle names storage {key[:100]} in two ways")
        self._stack.append(found)

    def call(self, _: Any) -> None:
        """Call a name with a tuple of arguments, which may make a tensor."""
        match self._popped(2):
            case [_Named(name), tuple(arguments)] if _NEEDED.fullmatch(name):
                if name in _TENSORS and not _is_within(name, arguments):
                    raise _broken(self._file, "a tensor is not within its storage")
                self._stack.append(_made(name, arguments))
            case _:
                raise _broken(self._file, "its pickle calls what is not a function of torch's")

    def build(self, _: Any) -> None:
        """Attributes of a dict; those of a tensor could give it another storage."""
        self._popped(1)
        if self._stack[-1] is not _ORDERED:
            raise _broken(self._file, "its pickle sets attributes of what is not a dict")


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """The value that a call gives, whose tensors have been found within their storages."""
    if name == _ORDERED_DICT:
        return _ORDERED
    if name in _TENSORS[:-1]:
        return PickledTensor(*arguments[:4])
    return _OTHER


def _is_within(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the tensor that a function of `_TENSORS` makes is within its storage."""
    match arguments:
        case (PickledStorage() as storage, int(offset), tuple(shape), tuple(strides), *rest):
            numbers = (offset, *shape, *strides)
        case _:
            return False
    if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        return False
    size = _STORAGES[storage.kind]
    if name == _TENSORS[-1]:
        match rest:
            case [_, _, _Named(dtype), *_] if dtype in _DTYPES:
                size = _DTYPES[dtype]
            case _:
                return False
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return 0 in shape or (last + 1) * size <= storage.num_bytes


def _is_flat(value: Any, levels: int) -> bool:
    """Whether tuples are in each other at most so often; each is in one place only."""
    if not isinstance(value, tuple):
        return True
    return levels > 0 and all(_is_flat(part, levels - 1) for part in value)


def _is_shape(value: tuple[Any, ...]) -> bool:
    return len(value) <= _LONGEST_SHAPE and all(isinstance(n, int) for n in value)


_CONSTANTS = frozenset(
    ["NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"]
    + ["BINUNICODE", "SHORT_BINSTRING", "EMPTY_DICT", "EMPTY_SET"]
)
_SMALL_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_METHODS: Mapping[str, Callable[[_Scan, Any], None]] = {
    "MARK": _Scan.mark,
    "NONE": _Scan.none,
    "TUPLE": _Scan.tuple_to_mark,
    "EMPTY_LIST": _Scan.empty_list,
    "APPEND": _Scan.append,
    "APPENDS": _Scan.appends,
    "SETITEM": _Scan.set_item,
    "SETITEMS": _Scan.set_items,
    "BINPUT": _Scan.put,
    "LONG_BINPUT": _Scan.put,
    "BINGET": _Scan.get,
    "LONG_BINGET": _Scan.get,
    "GLOBAL": _Scan.name,
    "BINPERSID": _Scan.storage,
    "REDUCE": _Scan.call,
    "NEWOBJ": _Scan.call,
    "BUILD": _Scan.build,
    "STOP": _Scan.stop,
}


class _Bounded:
    """A stream that ends with an error after so many bytes."""

    def __init__(self, stream: BufferedIOBase | IO[bytes], most_bytes: int) -> None:
        self._stream, self._left = stream, most_bytes

    def read(self, count: int) -> bytes:
        return self._counted(self._stream.read(max(0, min(count, self._left + 1))))

    def readline(self) -> bytes:
        return self._counted(self._stream.readline(self._left + 1))

    def tell(self) -> int:
        return 0

    def _counted(self, found: bytes) -> bytes:
        self._left -= len(found)
        if self._left < 0:
            raise ValueError("its pickle is longer than that of any checkpoint")
        return found


def _broken(file: Path, why: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{file} is not a valid file of torch.save ({why}). It may be an incomplete download: "
        "fetch it again."
    )
