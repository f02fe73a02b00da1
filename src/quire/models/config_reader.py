"""Typed reading of a Hugging Face config.json.

A key that is silently ignored can change every answer, so a family takes its keys through
`ConfigReader`, which remembers them; models/reading/keys.py judges what is left. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from quire.errors import LoadError, ModelNotFound, UnsupportedConfigValue
from quire.models.reading.floats import decoded
from quire.models.reading.keys import LeftKey, foreign_among
from quire.models.reading.listed import IRRELEVANT, NEUTRAL
from quire.models.reading.text_part import text_part
from quire.text.json_files import read_plain_json
from quire.text.model_files import has_file

LARGEST_SIZE = 10**9 - 1
"""The largest size; arithmetic with mistaken larger ones takes memory or does not end."""

LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
"""The range of other numbers: well inside of what float32 holds."""
_MAX_SHOWN = 120
"""Characters of a value that an error shows."""

_REQUIRED: Any = object()


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder, or its part about text: see `read_whole_config`."""
    return text_part(read_whole_config(folder))


def read_whole_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json. Raises ModelNotFound without one, LoadError if it has no object."""
    path = folder / "config.json"
    if not has_file(path):
        raise ModelNotFound(
            f"{folder} has no config.json: it is not a model folder in Hugging Face form."
        )
    config: dict[str, Any] = decoded(read_plain_json(path))
    return config


def unsupported(
    key: str, value: object, allowed: str, file: str = "config.json"
) -> UnsupportedConfigValue:
    """The refusal of a known key's value that is not implemented; names what would do."""
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = shown[: _MAX_SHOWN - 3] + "..."
    return UnsupportedConfigValue(
        f"{file}: {key}={shown} is not implemented; supported: {allowed}."
    )


def is_number(
    value: object, minimum: float = LEAST_NUMBER, maximum: float = LARGEST_NUMBER
) -> TypeGuard[int | float]:
    """Whether a value is a number in this range; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return minimum <= value <= maximum


def token_ids(key: str, value: object, vocab_size: int, file: str = "config.json") -> list[int]:
    """A key's ids: one, a list, or null. Raises UnsupportedConfigValue outside the vocabulary."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in listed if isinstance(i, int) and not isinstance(i, bool)]
    if len(ids) < len(listed) or not all(0 <= token_id < vocab_size for token_id in ids):
        allowed = f"an id below vocab_size={vocab_size}, a list of such ids, or null"
        raise unsupported(key, value, allowed, file)
    return ids


class ConfigReader:
    """Typed access to a JSON object of a config and those within it; remembers the keys read."""

    def __init__(
        self, config: Mapping[str, Any], where: str = "", *, is_part: bool = False
    ) -> None:
        """`where` precedes keys in errors; is_part: keys irrelevant in whole configs count."""
        self._config = config
        self._where = where
        self._is_part = is_part
        self._taken: set[str] = set()
        self._names: dict[str, str] = {}
        self._sections: dict[str, ConfigReader] = {}

    def __contains__(self, key: str) -> bool:
        return self._config.get(self._name(key)) is not None

    def rename(self, **others: str) -> None:
        """Read each key under another name if the config has it under that name: `rename(
        hidden_size="n_embd")`. Raises UnsupportedConfigValue where the config has two values.
        """
        for key, other in others.items():
            value, same = self._config.get(key), self._config.get(other)
            if same is None:
                continue
            if value is not None and value != same:
                raise unsupported(self._where + key, value, f"{other}={same!r}, its other name")
            self._taken.add(key)
            self._names[key] = other

    def supply(self, **values: Any) -> None:
        """Read these values where the config lacks the keys."""
        given = {key: value for key, value in self._config.items() if value is not None}
        self._config = {self._name(key): value for key, value in values.items()} | given

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as JSON gave it; null counts as absent."""
        value = self._get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise LoadError(f"config.json lacks {self.at(key)}, which this model needs.")
        return default

    def integer(
        self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = LARGEST_SIZE
    ) -> Any:
        """A whole number from `minimum` to `maximum`."""
        value = self.raw(key, default)
        if value is default and default is not _REQUIRED:
            return value
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:
            raise unsupported(
                self.at(key), value, f"an integer of at least {minimum} and at most {maximum}"
            )
        return value

    def number(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        minimum: float = LEAST_NUMBER,
        maximum: float = LARGEST_NUMBER,
    ) -> Any:
        """A number from `minimum` to `maximum`."""
        value = self.raw(key, default)
        if value is default and default is not _REQUIRED:
            return value
        if not is_number(value, minimum, maximum):
            allowed = f"a positive number of at least {minimum:g} and at most {maximum:g}"
            raise unsupported(self.at(key), value, allowed)
        return float(value)

    def bound(self, key: str, absent: float | None) -> Any:
        """A positive number, or None where the file says null; `absent`: of a missing key."""
        name = self._name(key)
        self._taken.add(name)
        if name in self._config and self._config[name] is None:
            return None
        return self.number(key, absent)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise unsupported(self.at(key), value, "true or false")
        return value

    def choice(self, key: str, table: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """The entry of `table` that the key's string names."""
        value = self.raw(key, default)
        if not isinstance(value, str) or value not in table:
            raise unsupported(self.at(key), value, ", ".join(map(repr, table)))
        return table[value]

    def choice_of(self, key: str, *allowed: Any, absent: Any = _REQUIRED) -> Any:
        """One of these values."""
        value = self.raw(key, absent)
        if isinstance(value, bool) or value not in allowed:
            raise unsupported(self.at(key), value, " or ".join(map(repr, allowed)))
        return value

    def ignore(self, *keys: str) -> None:
        """Take keys that say nothing about the computation, whatever their values."""
        self._taken.update(keys)

    def has_read(self, key: str) -> bool:
        """Whether the key was taken already, under whatever name it was asked for."""
        return key in self._taken

    def keys(self) -> tuple[str, ...]:
        """The names of all values that are not null."""
        return tuple(key for key, value in self._config.items() if value is not None)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse the key unless it is absent or has one of these values."""
        value = self._get(key)
        if value is not None and value not in allowed:
            raise unsupported(self.at(key), value, " or ".join(map(repr, allowed)))

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, the same reader each time; None when absent or empty."""
        value = self.raw(key, None)
        if value is None or value == {}:
            return None
        return self._nested(key, value, is_part=True)

    def subconfig(self, key: str) -> ConfigReader:
        """A nested object that is a config of its own; an empty one when absent."""
        return self._nested(key, self.raw(key, {}), is_part=False)

    def _nested(self, key: str, value: Any, *, is_part: bool) -> ConfigReader:
        if not isinstance(value, dict):
            raise unsupported(self.at(key), value, "an object")
        name = self._name(key)
        if name not in self._sections:
            self._sections[name] = ConfigReader(value, f"{self.at(key)}.", is_part=is_part)
        return self._sections[name]

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def at(self, key: str) -> str:
        """The key as errors name it."""
        return self._where + self._name(key)

    def _get(self, key: str) -> Any:
        """The value, which counts as read, or None."""
        self._taken.add(self._name(key))
        return self._config.get(self._name(key))

    def left(self) -> Iterator[LeftKey]:
        """Yield the keys that were not taken, those of nested objects that were asked for as well,
        and that no list says nothing of. Raises UnsupportedConfigValue for a key at a value that no
        family implements.
        """
        for key, value in self._config.items():
            if value is None or key in self._taken:
                continue
            if key in NEUTRAL:
                if value not in NEUTRAL[key]:
                    allowed = " or ".join(map(repr, (*NEUTRAL[key], None)))
                    raise unsupported(self._where + key, value, allowed)
            elif self._is_part or key not in IRRELEVANT:
                yield LeftKey((key,), value, self._config)
        for name, section in self._sections.items():
            for inner in section.left():
                yield LeftKey((name, *inner.path), inner.value, inner.within)

    def finish(self) -> None:
        """Raise UnknownConfigKey unless every key of the object is accounted for."""
        outer = tuple(self._where.split(".")[:-1])
        foreign_among(self.left(), None, outer, is_closed=True)
