"""The rule for keys of config.json. A key is

- known, whatever its value, if the family reads it (`ConfigReader`);
- neutral, if a list of ours says why it may have its value, or if the reference reads it and it has
  the default of the reference's class;
- unmet, if the reference reads it and it has another value: the model would be another one;
- foreign, if nothing reads it.

Where there is no reference, or the file names code of its own for the architecture, nothing is
foreign: what no list of ours has is unmet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import UnknownConfigKey
from quire.models.reading.reference import Reference

_ROPES = ("rope_parameters", "rope_scaling")
_MOST_SHOWN = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True, slots=True)
class LeftKey:
    """A key that a family did not read: names from the outermost on, value, its object."""

    path: tuple[str, ...]
    value: Any
    within: Mapping[str, Any]

    @property
    def rope_type(self) -> str | None:
        """The type of the rotation that it belongs to, None if it belongs to none."""
        if len(self.path) == 1 or self.path[0] not in _ROPES:
            return None
        return str(self.within.get("rope_type") or self.within.get("type") or "default")

    def below(self, *outer: str) -> LeftKey:
        """The key in a file in which these objects are around it."""
        return LeftKey((*outer, *self.path), self.value, self.within)

    def __str__(self) -> str:
        text = json.dumps(self.value)
        if len(text) > _MOST_SHOWN:
            text = text[: _MOST_SHOWN - 3] + "..."
        return f"{'.'.join(self.path)}={text}"


def names_own_code(config: Mapping[str, Any], architectures: Iterable[str]) -> bool:
    """Whether `auto_map` names a class of the repository for one of these architectures."""
    named = config.get("auto_map")
    if not isinstance(named, Mapping):
        return False
    classes = {str(each).rpartition(".")[2] for each in named.values()}
    return not classes.isdisjoint(architectures)


def foreign_among(
    left: Iterable[LeftKey],
    reference: Reference | None,
    outer: tuple[str, ...] = (),
    *,
    is_closed: bool,
) -> tuple[LeftKey, ...]:
    """The foreign keys among those that a family left, but for those that say nothing (false, 0,
    empty). `outer`: the objects of the file that are around them; is_closed: none is foreign.

    Raises UnknownConfigKey, which names all that are unmet.
    """
    unmet, foreign = [], []
    for key in left:
        is_read = reference is not None and not reference.lacks(key.path, key.rope_type)
        if reference is not None and is_read:
            if not _is_same(key.value, reference.default(key.path, key.rope_type)):
                unmet.append(key.below(*outer))
        elif reference is None or is_closed:
            unmet.append(key.below(*outer))
        elif key.value:
            foreign.append(key.below(*outer))
    if unmet:
        raise UnknownConfigKey(
            f"config.json has keys whose meaning is not implemented here: {listed(unmet)}. "
            "Ignoring them could change the answers; if they are harmless, remove them with "
            f"hf_overrides={removal(unmet)}."
        )
    return tuple(foreign)


def _is_same(value: Any, default: Any) -> bool:
    # 1 == True in Python, and in a config they are different values
    return bool(value == default and isinstance(value, bool) == isinstance(default, bool))


def listed(keys: Iterable[LeftKey]) -> str:
    """Keys and values, for a message."""
    return ", ".join(sorted(map(str, keys)))


def removal(keys: Iterable[LeftKey]) -> str:
    """The override that removes keys, as JSON."""
    changes: dict[str, Any] = {}
    for key in keys:
        *outer, last = key.path
        inner = changes
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = None
    return json.dumps(changes)
