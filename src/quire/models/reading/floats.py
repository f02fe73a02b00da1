"""Numbers that JSON cannot write."""

from __future__ import annotations

from typing import Any

_FLOATS = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}


def number_or_object(found: dict[str, Any]) -> Any:
    """The number that an object of JSON stands for, else the object; a hook of `json.loads`."""
    if len(found) == 1 and (name := found.get("__float__")) in _FLOATS:
        return _FLOATS[name]
    return found


def decoded(value: Any) -> Any:
    """JSON with numbers for objects like {"__float__": "Infinity"}, as transformers 5 writes."""
    if isinstance(value, dict):
        return number_or_object({key: decoded(each) for key, each in value.items()})
    return [decoded(each) for each in value] if isinstance(value, list) else value
