"""Reads a pickle of torch.save as data, before torch unpickles it.

torch's restricted unpickler runs no code, but it builds what it is asked for: a byte array of any
size, tuples whose hash takes longer than anybody waits, tensors that reach beyond their storage's
end. So the opcodes are followed here with values that cost nothing, and whatever a dict of tensors
does not need is refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, cast

import torch

from quire.errors import CorruptCheckpoint, LoadError

_MOST_OPCODES = 4_000_000
"""Some forty for each of 100,000 tensors."""
_LONGEST_SHAPE = 64
_NEEDED = re.compile(
    r"collections\.OrderedDict"
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


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """Memory that a pickle names: the key of its record, and its bytes."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Named:
    """A class or function that is asked for."""

    name: str


_MARK, _OTHER = object(), object()
"""Where a list of values begins, and a value that does not matter."""


def scan_pickle(
    file: Path, stream: BufferedIOBase | IO[bytes], most_bytes: int
) -> list[PickledStorage]:
    """The storages of the pickle that `stream` is at the beginning of; it is left at its end.

    Raises CorruptCheckpoint, which names `file`, for a pickle that is no dict of tensors, or has
    more than `most_bytes`.
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
    return scan.storages


class _Scan:
    """The stack and the memo of a pickle machine, with tuples, numbers, texts and names as they are
    and `_OTHER` for all else.
    """

    def __init__(self, file: Path) -> None:
        self.storages: list[PickledStorage] = []
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Do what an opcode does. Raises CorruptCheckpoint for one that is not needed."""
        if name in _CONSTANTS:
            self._stack.append(argument if isinstance(argument, int | str) else _OTHER)
        elif name in _POPS:
            del self._stack[len(self._stack) - _POPS[name] :]
        elif name in _SMALL_TUPLES:
            self._stack.append(tuple(self._popped(_SMALL_TUPLES[name])))
        elif name in _MADE:
            self._popped(_MADE[name])
            self._stack.append(_OTHER)
        elif name in _METHODS:
            _METHODS[name](self, argument)
        elif name not in ("PROTO", "STOP"):
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

    def drop_to_mark(self, _: Any) -> None:
        self._to_mark()

    def tuple_to_mark(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        value = self._memo[index]
        if isinstance(value, tuple) and not _is_shape(value):
            raise _broken(self._file, "its pickle has one tuple in several places")
        self._stack.append(value)

    def name(self, argument: str) -> None:
        name = argument.replace(" ", ".")
        if not (name in _STORAGES or _NEEDED.fullmatch(name) or _is_dtype(name)):
            raise CorruptCheckpoint(
                f"{self._file} asks for {name[:200]} while it is unpickled, which could run any "
                "code, so it is not read. Use a safetensors version of the model."
            )
        self._stack.append(_Named(name))

    def storage(self, _: Any) -> None:
        """Of ('storage', class, key, device, number of values, ...)."""
        stated = self._stack.pop()
        match stated:
            case ("storage", _Named(name), str(key), str(), int(count), *_) if name in _STORAGES:
                self.storages.append(PickledStorage(key, max(0, count) * _STORAGES[name]))
            case _:
                raise _broken(self._file, "its pickle names a storage in another way than torch")
        self._stack.append(_OTHER)


def _is_shape(value: tuple[Any, ...]) -> bool:
    return len(value) <= _LONGEST_SHAPE and all(isinstance(n, int) for n in value)


def _is_dtype(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return module == "torch" and isinstance(getattr(torch, last, None), torch.dtype)


_CONSTANTS = frozenset(
    ["NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"]
    + ["BINUNICODE", "SHORT_BINSTRING", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"]
)
_POPS = {"BUILD": 1, "APPEND": 1, "SETITEM": 2}
"""What an opcode takes from the stack, where it leaves a container there."""
_SMALL_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MADE = {"REDUCE": 2, "NEWOBJ": 2}
_METHODS: Mapping[str, Callable[[_Scan, Any], None]] = {
    "MARK": _Scan.mark,
    "TUPLE": _Scan.tuple_to_mark,
    "APPENDS": _Scan.drop_to_mark,
    "SETITEMS": _Scan.drop_to_mark,
    "BINPUT": _Scan.put,
    "LONG_BINPUT": _Scan.put,
    "BINGET": _Scan.get,
    "LONG_BINGET": _Scan.get,
    "GLOBAL": _Scan.name,
    "BINPERSID": _Scan.storage,
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
        f"{file} is no valid file of torch.save ({why}). It may be an incomplete download: "
        "fetch it again."
    )
