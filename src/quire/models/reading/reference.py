"""The keys that transformers reads, by type of model: `reference_keys.json`, which
tools/reference_keys.py makes from its configuration classes and modelling files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.models.reading.floats import number_or_object

_TABLE = Path(__file__).with_name("reference_keys.json")


@dataclass(frozen=True, slots=True)
class Reference:
    """A type of model as transformers has it.

    keys: those that it reads, with the defaults of its class; a key of an object stands behind
    that of the object and a dot, one of a rotation behind "rope.". aliases: other names of keys.
    """

    kind: str
    architectures: tuple[str, ...]
    keys: Mapping[str, Any]
    aliases: Mapping[str, str]
    ropes: Mapping[str, Iterable[str]]

    def lacks(self, path: tuple[str, ...], rope_type: str | None) -> bool:
        """Whether nothing of it reads the key; `rope_type`: of the rotation that has the key."""
        if rope_type is None:
            return ".".join(path) not in self.keys
        return f"rope.{path[-1]}" not in self.keys and path[-1] not in self.ropes.get(rope_type, ())

    def default(self, path: tuple[str, ...], rope_type: str | None) -> Any:
        """Meaning of an absent key, None where code computes it."""
        return self.keys.get(".".join(path) if rope_type is None else f"rope.{path[-1]}")


@cache
def _table() -> dict[str, Any]:
    text = _TABLE.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, object_hook=number_or_object)
    return found


@cache
def _kinds_by_architecture() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind, entry in _table()["models"].items():
        for name in entry["architectures"]:
            found.setdefault(name, []).append(kind)
    return found


def reference_of(architectures: Iterable[str], kind: object = None) -> Reference | None:
    """The type of the first of these architectures that transformers has, `kind` where that is one
    of several; None: it has none of them.
    """
    for name in architectures:
        if kinds := _kinds_by_architecture().get(name):
            return _reference(str(kind) if kind in kinds else kinds[0])
    return None


def reference_of_kind(kind: object) -> Reference | None:
    """The type of this name (`model_type`), or None."""
    return _reference(kind) if isinstance(kind, str) and kind in _table()["models"] else None


def text_kind_of(kind: object) -> str | None:
    """The type of the text part of a model that transformers has in several parts; else None."""
    found: str | None = _table()["text_parts"].get(kind) if isinstance(kind, str) else None
    return found


def tower_kind_of(kind: object) -> str | None:
    """The type of a model's vision encoder where its config lacks it; None for others."""
    found: str | None = _table()["tower_kinds"].get(kind) if isinstance(kind, str) else None
    return found


def tower_reference(kind: object) -> Reference | None:
    """A type of vision encoder, or None."""
    return _other("towers", kind)


def whole_reference(kind: object) -> Reference | None:
    """A type of model of several parts by the keys around these, or None."""
    return _other("wholes", kind)


def _other(part: str, kind: object) -> Reference | None:
    table = _table()
    if not isinstance(kind, str) or kind not in table[part]:
        return None
    entry = table[part][kind]
    keys = table["shared"] | entry["keys"]
    return Reference(kind, (), keys, entry.get("aliases", {}), table["ropes"])


@cache
def _reference(kind: str) -> Reference:
    table = _table()
    entry = table["models"][kind]
    return Reference(
        kind,
        tuple(entry["architectures"]),
        table["shared"] | entry["keys"],
        entry.get("aliases", {}),
        table["ropes"],
    )
