"""Functions for cores in other processes, and pickled values of trainers: both where
QUIRE_ALLOW_INSECURE_SERIALIZATION=1 allows them.

Reading a function runs code that the sender chose, so both ends must have been started with that
variable. It is the one place of the package that unpickles.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any, NoReturn

from quire.encodable import NotEncodable, text_of
from quire.environment import may_send_functions

_PICKLER = "cloudpickle"
_VALUE_PICKLER = "pickle"

FUNCTION = 4
"""The MessagePack extension code of a function."""


def pack_function(function: Callable[..., Any]) -> bytes:
    """A function as bytes. Raises NotEncodable if it may not travel or cannot be pickled."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if not may_send_functions():
        raise NotEncodable(
            f"it has the function {name}: name a method of the worker, or of a "
            "worker_extension_cls, or set QUIRE_ALLOW_INSECURE_SERIALIZATION=1 here and where the "
            "cores are started"
        )
    dumps = _pickler().dumps
    try:
        dumped: bytes = dumps(function)
    except Exception as error:  # of what the function holds
        raise NotEncodable(f"it has the function {name}: {text_of(error)}") from error
    return dumped


def unpack_function(data: bytes) -> Callable[..., Any]:
    """The function; a bad one raises when called. Raises ValueError if none may travel."""
    if not may_send_functions():
        raise ValueError("functions are refused: QUIRE_ALLOW_INSECURE_SERIALIZATION is not 1")
    try:
        function: Callable[..., Any] = _pickler().loads(data)
    except Exception as error:
        return _failing(f"The function cannot be made here: {type(error).__name__}: {error}")
    return function


def unpickle_values(data: bytes, is_known: Callable[[str, str], bool]) -> Any:
    """Unpickle plain values, and objects whose module and name `is_known` accepts.
    Raises ValueError where nothing may be unpickled, for another object, and for damaged data.
    """
    if not may_send_functions():
        raise ValueError("they are unpickled only with QUIRE_ALLOW_INSECURE_SERIALIZATION=1")
    pickler: Any = importlib.import_module(_VALUE_PICKLER)

    class RestrictedUnpickler(pickler.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if not is_known(module, name):
                raise ValueError(f"it has {module}.{name}, which no such value is made of")
            return super().find_class(module, name)

    try:
        return RestrictedUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged data raises nearly anything
        raise ValueError(f"it cannot be read: {text_of(error)}") from error


def _pickler() -> Any:
    try:
        return importlib.import_module(_PICKLER)
    except ModuleNotFoundError:
        text = "it has a function, which needs the package cloudpickle: pip install cloudpickle"
        raise NotEncodable(text) from None


def _failing(text: str) -> Callable[..., NoReturn]:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(text)

    return fail
