"""Types of the arguments of a request's tools."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

MAX_REFERENCES = 16
"""The most schemas from which one argument's types are gathered: a schema may refer to itself."""
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
OTHER_TYPES = {
    other: kind
    for kind, others in {
        "integer": "int uint long short byte unsigned bigint smallint tinyint",
        "number": "num float double decimal numeric real",
        "boolean": "bool",
        "string": "str text char character varchar longtext date datetime time timestamp uuid url",
        "array": "list tuple set frozenset sequence iterable arr",
        "object": "dict map mapping struct record obj json",
        "null": "none nil nonetype",
    }.items()
    for other in others.split()
}
"""Names of JSON's types in schemas of Python, SQL and others, and the types."""
_TYPE_WORD = re.compile(r"[a-z_]+")
"""The word for the type in `int64`, `varchar(20)` and `list[str]`."""


class ToolSchemas:
    """The tools of one request, as `{"type": "function", "function": {...}}` or flat
    `{"type": "function", "name": ...}`. A malformed tool has no types.
    """

    __slots__ = ("_schemas",)

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}

    @property
    def names(self) -> Collection[str]:
        return self._schemas.keys()

    def properties(self, tool: str) -> frozenset[str]:
        """The names of a tool's arguments; empty if the schema does not say."""
        root = self._schemas.get(tool, {})
        found = [part.get("properties") for part in _alternatives(root, root)]
        return frozenset(name for part in found if isinstance(part, Mapping) for name in part)

    def required(self, tool: str) -> frozenset[str]:
        """The names of the arguments that a tool cannot do without."""
        root = self._schemas.get(tool, {})
        found = [part.get("required") for part in (root, *_parts_of_all(root))]
        return frozenset(
            name for part in found if isinstance(part, list | tuple) for name in part
            if isinstance(name, str)
        )  # fmt: skip

    def types(self, tool: str, *path: str) -> frozenset[str]:
        """The JSON types that an argument, or what is at a path within one, may have; empty if the
        schema does not say. A step of the path is a property's name, or any name of an item.
        """
        root = self._schemas.get(tool, {})
        places: list[Any] = [root]
        for step in path:
            parts = [part for place in places for part in _alternatives(place, root)]
            places = [inner for part in parts[:MAX_REFERENCES] for inner in _inner(part, step)]
        found: set[str] = set()
        for part in [part for place in places for part in _alternatives(place, root)]:
            declared = part.get("type")
            names = declared if isinstance(declared, list | tuple) else [declared]
            found.update(json_type_named(name) for name in names if isinstance(name, str))
            found.update(_types_of_values(part))
        return frozenset(found & TYPES)


def valid_arguments(written: str, tool: str, schemas: ToolSchemas) -> str | None:
    """Arguments without unknown ones; None where a required one is missing or comes twice."""
    try:
        # as pairs, since a dict would hide an argument that comes twice
        pairs: list[tuple[str, Any]] = json.loads(written, object_pairs_hook=list, strict=False)
    except (ValueError, RecursionError):  # a value that nests a thousand levels deep
        return None
    names = [name for name, _ in pairs]
    known = schemas.properties(tool)
    if len(set(names)) < len(names) or not schemas.required(tool) <= {*names}:
        return None
    if not known or known.issuperset(names):
        return written
    whole: dict[str, Any] = json.loads(written, strict=False)
    kept = {name: value for name, value in whole.items() if name in known}
    return json.dumps(kept, ensure_ascii=False)


def _parts_of_all(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list | tuple) else ():
        if isinstance(part, Mapping):
            yield part


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and those that it is made of, followed through references."""
    waiting, num_seen = [schema], 0
    while waiting and num_seen < MAX_REFERENCES:
        part = waiting.pop(0)
        num_seen += 1
        if not isinstance(part, Mapping):
            continue
        yield part
        for key in ("anyOf", "oneOf", "allOf"):
            choices = part.get(key)
            waiting.extend(choices if isinstance(choices, list | tuple) else [])
        if isinstance(part.get("$ref"), str):
            waiting.append(_referred(part["$ref"], root))


def _inner(schema: Mapping[str, Any], step: str) -> list[Any]:
    """The schemas of a property, or of the items of a list."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and step in properties:
        return [properties[step]]
    others = (schema.get("items"), schema.get("additionalProperties"))
    return [other for other in others if isinstance(other, Mapping)]


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def json_type_named(name: str) -> str:
    """The type of JSON that a type's name in a schema means; the name itself if it means none."""
    found = _TYPE_WORD.match(name.strip().lower())
    word = found[0] if found else ""
    return word if word in TYPES else OTHER_TYPES.get(word, name)


def _types_of_values(schema: Mapping[str, Any]) -> set[str]:
    """The types of an enum's or const's values, where no type is given."""
    if "type" in schema:
        return set()
    values = schema.get("enum")
    values = list(values) if isinstance(values, list | tuple) else []
    if "const" in schema:
        values.append(schema["const"])
    return {type_name(value) for value in values}


def type_name(value: Any) -> str:
    """The JSON type of a decoded value."""
    match value:
        case None:
            return "null"
        # before int, of which it is a subclass
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
    return "array"
