"""The methods that `dataclasses` writes for each class, compiled once.

Making a dataclass is mostly compiling source. What an engine imports makes 550 of them, half of
them torch's, which takes a seventh of a start. The results lie beside the package's bytecode, since
they are nothing else: who can write there can write the package, and Python's settings for bytecode
hold for them as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import marshal
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

_HASH_BYTES = 8
_MOST = 10_000
"""Sources that are kept, three times those of an engine: other releases of torch have others."""


class _Methods:
    """Sources and their bytecode: the file's, read with the first class, and new ones."""

    def __init__(self) -> None:
        self._known: dict[str, CodeType] | None = None
        self._used: dict[str, CodeType] = {}
        self._has_new = False

    def run(self, source: str | CodeType, names: dict[str, Any], locals_: dict[str, Any]) -> None:
        """Stands in for `exec`, with its arguments."""
        if not isinstance(source, str):
            exec(source, names, locals_)
            return
        if self._known is None:
            self._known = _read()
        code = self._known.get(source)
        if code is None:
            code = self._known[source] = compile(source, "<string>", "exec", dont_inherit=True)
            self._has_new = True
        self._used[source] = code
        exec(code, names, locals_)

    def keep(self) -> None:
        """Write the file, if there is something new."""
        if self._has_new and self._known is not None and not sys.dont_write_bytecode:
            if len(self._known) > _MOST:
                self._known = self._used
            # an installation that cannot be written to, a Python that keeps no bytecode
            with contextlib.suppress(OSError, NotImplementedError):
                _write(self._known)
        self._has_new = False


_methods = _Methods()


@contextmanager
def compiled_methods() -> Iterator[None]:
    """Compile no method of a dataclass while the block runs that was compiled before, in this
    process or another one. The classes are the same as without.
    """
    if "exec" in vars(dataclasses):  # a block within a block
        yield
        return
    dataclasses.exec = _methods.run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # two threads may have begun a block at the same time
        vars(dataclasses).pop("exec", None)
        _methods.keep()


def _file() -> Path:
    """The file beside the bytecode of this version and optimization of Python."""
    return Path(
        importlib.util.cache_from_source(str(Path(__file__).with_stem("methods_of_dataclasses")))
    )


def _read() -> dict[str, CodeType]:
    try:
        data = _file().read_bytes()
    except (OSError, NotImplementedError):  # the latter: a Python that keeps no bytecode
        return {}
    start = len(importlib.util.MAGIC_NUMBER) + _HASH_BYTES
    if data[:start] != _head(data[start:]):
        return {}
    known: dict[str, CodeType] = marshal.loads(memoryview(data)[start:])
    return known


def _write(known: dict[str, CodeType]) -> None:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    data = marshal.dumps(known)
    try:
        part.write_bytes(_head(data) + data)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _head(data: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + importlib.util.source_hash(data)
