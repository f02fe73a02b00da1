"""The keywords of one schema: checked, and told apart by what is done about them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.grammar.json_schema.places import Place

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""The types, with "fraction" for the numbers of type "number" that are not integers."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""The formats of strings that are enforced; any other is an annotation."""

_NOTES = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema"),
        *("$vocabulary", "definitions", "id"),
        *("title", "description", "default", "deprecated", "examples", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        *("components", "discriminator", "example", "externalDocs", "xml"),
    }
)
"""Keywords that constrain nothing, so that nothing is to be said about them."""
_DIALECTS = re.compile(r"https?://(json-schema\.org|spec\.openapis\.org)/")
"""Addresses of the dialects that are read as the standard; others may mean something else."""
_CONDITION = "a condition cannot be enforced; list the cases in anyOf"
_REFERENCE = "only a reference by $ref can be followed"
_REFUSED = {
    "$dynamicRef": _REFERENCE,
    "$recursiveRef": _REFERENCE,
    "contains": "what a list contains cannot be enforced; items and prefixItems can",
    "then": _CONDITION,
    "else": _CONDITION,
}
"""Keywords that constrain in a way that masks cannot enforce, with advice."""
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords without a meaning where another one is missing."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The keywords of a schema that are enforced.

    `own` apply to a value and what is in it, `kinds` (None: all) are the types that it allows, and
    `combining` are those that join further schemas. `unenforced`: the keywords that are left out,
    as annotations.
    """

    own: dict[str, Any] = field(default_factory=dict)
    kinds: frozenset[str] | None = None
    combining: tuple[str, ...] = ()
    unenforced: tuple[str, ...] = ()


def keywords_of(place: Place, *, ref_stands_alone: bool) -> Keywords:
    """Return the keywords of a place whose schema is an object. `ref_stands_alone`: nothing counts
    next to a `$ref`. Raises SchemaError for one that is invalid or cannot be enforced.
    """
    schema = place.schema
    assert isinstance(schema, dict)
    if ref_stands_alone and "$ref" in schema:
        return Keywords(combining=("$ref",))
    own: dict[str, Any] = {}
    combining, unenforced = [], []
    for name, value in schema.items():
        if name == "$schema" and not _is_known_dialect(value):
            unenforced.append(name)
        # an `if` alone constrains nothing; then and else are refused
        if name in _NOTES or name == "if" or name.startswith("x-"):
            continue
        if name in _NEEDS and _NEEDS[name] not in schema:
            continue
        if name in _REFUSED:
            raise place.unsupported(f"{name} is not supported: {_REFUSED[name]}")
        if name in _COMBINING:
            _COMBINING[name](place, value, name)
            combining.append(name)
        elif name in _OWN:
            _OWN[name](place, value, name)
            if name == "uniqueItems" or (name == "format" and value not in FORMATS):
                unenforced += [name] * bool(value)
            else:
                own[name] = value
        # false switches a keyword off, whatever it is
        elif value is not False:
            unenforced.append(name)
    kinds = _kinds(own["type"]) if "type" in own else None
    return Keywords(own, kinds, tuple(combining), tuple(unenforced))


def _is_known_dialect(uri: object) -> bool:
    return isinstance(uri, str) and _DIALECTS.match(uri) is not None


def _kinds(given: str | list[str]) -> frozenset[str]:
    names = {given} if isinstance(given, str) else set(given)
    if "number" in names:
        # apart, so that "not integer" and "number" can be joined
        names = names - {"number"} | {"integer", "fraction"}
    return frozenset(names)


_Step = str | int
_Check = Callable[..., None]
"""Called with a place, the value of a keyword, and the steps to it from the place."""


def _type(place: Place, value: Any, *steps: _Step) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(one, str) and one in TYPES for one in names):
        raise place.error(f"it must be one of {', '.join(TYPES)}, or a list of them", *steps)


def _number(place: Place, value: Any, *steps: _Step) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise place.error("it must be a number", *steps)


def _count(place: Place, value: Any, *steps: _Step) -> None:
    _number(place, value, *steps)
    if value < 0 or value != int(value):
        raise place.error("it must be a whole number of at least 0", *steps)


def _bound(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, bool):  # draft 4 has a flag for whether the bound is exclusive
        _number(place, value, *steps)


def _multiple(place: Place, value: Any, *steps: _Step) -> None:
    _number(place, value, *steps)
    if value <= 0:
        raise place.error("it must be above 0", *steps)


def _text(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, str):
        raise place.error("it must be a text", *steps)


def _flag(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, bool):
        raise place.error("it must be true or false", *steps)


def _names(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise place.error("it must be a list of names", *steps)


def _values(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, list):
        raise place.error("it must be a list of values", *steps)


def _value(place: Place, value: Any, *steps: _Step) -> None:
    pass


def _schema(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, dict | bool):
        raise place.error("a schema is an object, true or false", *steps)


def _schemas(place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, list):
        raise place.error("it must be a list of schemas", *steps)
    for index, one in enumerate(value):
        _schema(place, one, *steps, index)


def _items(place: Place, value: Any, *steps: _Step) -> None:
    (_schemas if isinstance(value, list) else _schema)(place, value, *steps)


def _names_or_schema(place: Place, value: Any, *steps: _Step) -> None:
    (_names if isinstance(value, list) else _schema)(place, value, *steps)


def _by_name(check: _Check, place: Place, value: Any, *steps: _Step) -> None:
    if not isinstance(value, dict):
        raise place.error("it must be an object", *steps)
    for name, one in value.items():
        check(place, one, *steps, name)


_OWN: dict[str, _Check] = {
    "type": _type,
    "const": _value,
    "enum": _values,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _multiple,
    **dict.fromkeys(("pattern", "format"), _text),
    "items": _items,
    "prefixItems": _schemas,
    **dict.fromkeys(("additionalItems", "unevaluatedItems"), _schema),
    "uniqueItems": _flag,
    **dict.fromkeys(("properties", "patternProperties"), partial(_by_name, _schema)),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames"), _schema),
    "required": _names,
}
_COMBINING: dict[str, _Check] = {
    "$ref": _text,
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _schemas),
    "not": _schema,
    "dependentRequired": partial(_by_name, _names),
    "dependentSchemas": partial(_by_name, _schema),
    "dependencies": partial(_by_name, _names_or_schema),
}
