"""A model's config.json as an object, whose keys are attributes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys that hold the config of the language model in one of several models."""


class ConfigJson:
    """Reads a config.json by attributes, nested objects too; what it gives is a copy."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(
                f"config.json has no {name!r}: it has {', '.join(sorted(self._values))}.",
                name=name,
                obj=self,
            ) from None
        return ConfigJson(value) if isinstance(value, Mapping) else copy.deepcopy(value)

    # copy and pickle would ask an object without values for attributes, and recurse
    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigJson, (self._values,)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigJson) and other._values == self._values

    __hash__ = None  # type: ignore[assignment]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        return getattr(self, name) if name in self._values else default

    def to_dict(self) -> dict[str, Any]:
        """All of it as a dict."""
        return copy.deepcopy(dict(self._values))

    def get_text_config(self, decoder: bool = True) -> ConfigJson:
        """The part of the language model; all of it where it has no parts."""
        found = (getattr(self, key) for key in _TEXT_PARTS if key in self._values)
        return next((part for part in found if isinstance(part, ConfigJson)), self)

    def __repr__(self) -> str:
        return f"ConfigJson({dict(self._values)!r})"
