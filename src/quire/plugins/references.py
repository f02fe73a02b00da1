"""Values that are named as "module:attribute", and imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from quire.errors import PluginError


def resolve_reference(given: Any) -> Any:
    """The value itself, imported where it is given as "module:name" (a dot may stand for the
    colon). Raises PluginError where that fails.
    """
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


def attribute_at(module: Any, path: str) -> Any:
    """The value at a dotted path in a module ("" is the module). Raises PluginError."""
    found = module
    for part in filter(None, path.split(".")):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise PluginError(f"{module.__name__} has no {path}.") from error
    return found
