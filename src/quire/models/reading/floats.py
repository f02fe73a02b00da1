"""Numbers that JSON cannot write."""

from __future__ import annotations

from typing import Any

_FLOATS = {name: float(name) for name in ("Infinity", "-Infinity", "NaN")}


def decoded(value: Any) -> Any:
    """A value of JSON with numbers in the place of objects like {"__float__": "Infinity"}, as
    transformers 5 writes them.
    """
    if isinstance(value, dict):
        if len(value) == 1 and (name := value.get("__float__")) in _FLOATS:
            return _FLOATS[name]
        return {key: decoded(each) for key, each in value.items()}
    return [decoded(each) for each in value] if isinstance(value, list) else value
