"""Values that are named as "module:attribute", and imported when they are needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from quire.errors import InvalidParameter, PluginError

C = TypeVar("C")


def resolve_reference(given: Any) -> Any:
    """The value, imported where it is "module:name" or dotted. Raises PluginError."""
    if not isinstance(given, str):
        return given
    module, colon, path = given.partition(":")
    if not colon:
        module, _, path = given.rpartition(".")
    if not module or not path:
        raise PluginError(f"{given!r} does not name something as 'module:name'.")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise PluginError(f"{given} cannot be imported: {what}") from error
    return attribute_at(found, path)


class References(Mapping[str, Any]):
    """Values by name, given as "module:name" and imported when they are looked up."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __getitem__(self, name: str) -> Any:
        return resolve_reference(self._given[name])

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def attribute_at(module: Any, path: str) -> Any:
    """The value at a dotted path in a module ("" is the module). Raises PluginError."""
    found = module
    for part in filter(None, path.split(".")):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise PluginError(f"{module.__name__} has no {path}.") from error
    return found


def require_module(option: str, given: str) -> None:
    """Raise InvalidParameter where the module of a name is not there. It is not imported, but the
    packages that it is in are.
    """
    module, colon, _ = given.partition(":")
    if not colon:
        module = given.rpartition(".")[0]
    try:
        # one that was run or made has no spec to be found by
        if module in sys.modules or (module and importlib.util.find_spec(module) is not None):
            return
        why = f"no module named {module!r}" if module else "it names no module"
    except Exception as error:  # of a package's own code
        why = f"{type(error).__name__}: {error}"
    raise InvalidParameter(option, given, f"it cannot be imported ({why})")


def class_of_option(option: str, given: str, base: type[C], hint: str) -> type[C]:
    """The class below `base` that an option names. Raises InvalidParameter."""
    try:
        found = resolve_reference(given)
    except PluginError as error:
        raise InvalidParameter(option, given, str(error)) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        allowed = f"it must be a subclass of {base.__module__}.{base.__qualname__}"
        raise InvalidParameter(option, given, allowed, hint)
    return found


def class_of_connector(config: str, prefix: str, module: str, name: str, base: type) -> Any:
    """The class below `base` that the dict `config` of options names by `{prefix}_module_path` and
    `{prefix}`. Raises InvalidParameter.
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InvalidParameter(f"{config}['{prefix}_module_path']", module, str(error)) from error
    if not isinstance(found, type) or not issubclass(found, base):
        allowed = f"its module has such a class below {base.__qualname__}"
        raise InvalidParameter(f"{config}['{prefix}']", name, allowed)
    return found
