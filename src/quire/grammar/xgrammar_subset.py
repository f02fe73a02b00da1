"""The forms that xgrammar enforces correctly: all others are left to another library.

It ignores what it does not support, with a line on standard error at best, and has bugs (a string
with a length may have control characters in it, which is not JSON), so this is a list of what was
verified in 0.2.8 (tests/grammar/test_xgrammar.py), not of what fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.grammar.source import WHITESPACE, LoweredSource

_Schema = Mapping[str, Any]
_Rule = Callable[[Any, _Schema], bool]

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\(\?.?|.", re.DOTALL)
_LETTERS = "dwsntrfv"
"""Escaped letters that it reads as Python does; it reads the negated classes differently."""


def takes(source: LoweredSource) -> bool:
    """Whether it enforces all of a form."""
    if source.kind == "schema":
        return source.whitespace in (WHITESPACE, "") and _takes_schema(json.loads(source.text))
    if source.kind == "regex":
        return regex(source.text) is not None
    return source.kind == "choice" or (source.kind == "grammar" and "::=" in source.text)


def regex(pattern: str) -> str | None:
    """The pattern in its notation; None for one that it would read differently."""
    parts = _PART.findall(pattern)
    last = len(parts) - 1
    for place, part in enumerate(parts):
        is_anchor = part in "^$" and place != (0 if part == "^" else last)
        is_group = part.startswith("(?") and part != "(?:"
        is_class = part.startswith("[") and (len(part) == 1 or "[" in part[1:])
        if is_anchor or is_group or is_class or not all(map(_is_known, re.findall(r"\\.", part))):
            return None
    # its dot matches line ends, Python's does not
    return "".join(r"[^\n]" if part == "." else part for part in parts)


def _is_known(escape: str) -> bool:
    return escape[1] in _LETTERS or not (escape[1].isalnum() or escape[1].isspace())


def _takes_schema(schema: object) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    shared = [schema.get(name, {}) for name in ("$defs", "definitions")]
    if not all(isinstance(each, dict) and _all_taken(list(each.values())) for each in shared):
        return False
    said = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    kind = said.get("type")
    if isinstance(kind, str) and kind in _OF_TYPE:
        rules = {"type": _anything} | _OF_TYPE[kind]
    elif len(said) <= 1:
        rules = _ALONE
    else:
        return False
    return all(name in rules and rules[name](value, said) for name, value in said.items())


def _all_taken(schemas: object) -> bool:
    return isinstance(schemas, list) and all(map(_takes_schema, schemas))


def _is_shared(value: object, _: _Schema) -> bool:
    """A reference to the whole or to one of its definitions."""
    return isinstance(value, str) and bool(re.fullmatch(r"#|#/(\$defs|definitions)/[^/~%]+", value))


def _is_bound(value: Any, said: _Schema) -> bool:
    kinds = (int, float) if said["type"] == "number" else int
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    return abs(value) <= _MOST if isinstance(value, int) else _is_short(value)


def _is_short(value: float) -> bool:
    """Whether it survives being written with six decimals, as the library does."""
    return abs(value) < _MOST_SHORT and float(f"{value:.6f}") == value


def _is_pattern(value: object, said: _Schema) -> bool:
    """One whose texts need no escapes in JSON, and the only rule of its string. The library takes
    every pattern for one of whole texts.
    """
    is_alone = said.keys() == {"type", "pattern"}
    return is_alone and isinstance(value, str) and _is_anchored(value) and _is_plain(value)


def _is_anchored(pattern: str) -> bool:
    """Whether it begins and ends with anchors that hold for all of it."""
    parts = _PART.findall(pattern)
    depth = 0
    for part in parts:
        depth += part.startswith("(") - (part == ")")
        if part == "|" and depth == 0:
            return False
    return len(parts) > 1 and parts[0] == "^" and parts[-1] == "$"


def _is_plain(pattern: str) -> bool:
    # the library writes a pattern's text as it is, so that quotes and control characters would
    # break JSON
    safe = re.sub(r"\\[dw]|\\[-.+*?()|{}\[\]^$/]", "", pattern)
    return regex(pattern) is not None and not re.search(r'[\\".\x00-\x1f]|\[\^', safe)


def _is_format(value: object, said: _Schema) -> bool:
    return said.keys() == {"type", "format"} and value in _FORMATS


def _are_texts(value: Any, said: _Schema) -> bool:
    is_list = said.keys() == {"type", "enum"} and isinstance(value, list)
    return is_list and all(isinstance(text, str) for text in value)


def _is_closed(value: object, said: _Schema) -> bool:
    """An open object could name a property twice."""
    return _takes_schema(value) if "properties" not in said else value is False


def _are_properties(value: object, said: _Schema) -> bool:
    is_closed = said.get("additionalProperties") is False
    return is_closed and isinstance(value, dict) and _all_taken(list(value.values()))


def _are_known(value: object, said: _Schema) -> bool:
    names = said.get("properties", {})
    return isinstance(value, list) and all(isinstance(n, str) and n in names for n in value)


def _anything(value: object, _: _Schema) -> bool:
    return True


def _is_taken(value: object, _: _Schema) -> bool:
    return value is False or _takes_schema(value)


def _are_taken(value: object, _: _Schema) -> bool:
    return _all_taken(value)


_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "$schema", "deprecated")
    + ("readOnly", "writeOnly", "$defs", "definitions")
)
_ALONE: dict[str, _Rule] = {
    "$ref": _is_shared,
    "anyOf": _are_taken,
    "const": _anything,
    "enum": _anything,
    "type": lambda value, _: isinstance(value, list),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE: dict[str, dict[str, _Rule]] = {
    "null": {},
    "boolean": {},
    "integer": dict.fromkeys(_BOUNDS, _is_bound),
    "number": dict.fromkeys(_BOUNDS, _is_bound),
    "string": {
        "pattern": _is_pattern,
        "format": _is_format,
        "enum": _are_texts,
    },
    "array": {
        "items": _is_taken,
        "prefixItems": _are_taken,
        "minItems": _anything,
        "maxItems": _anything,
    },
    "object": {
        "properties": _are_properties,
        "required": _are_known,
        "additionalProperties": _is_closed,
    },
}
_FORMATS = ("duration", "uuid")
_MOST = 2**53
"""The largest bound of an integer."""
_MOST_SHORT = 1e8
"""The largest bound of a number with decimals."""
