"""Functions for cores in other processes, where QUIRE_ALLOW_INSECURE_SERIALIZATION=1 allows them.

Reading one runs code that the sender chose, so both ends must have been started with that variable.
It is the one place of the package that unpickles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

from quire.encodable import NotEncodable, text_of
from quire.environment import may_send_functions

_PICKLER = "cloudpickle"

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
