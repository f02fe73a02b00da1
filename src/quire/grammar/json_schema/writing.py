"""Writes an unfolded graph as a schema again, of the few keywords that libraries enforce whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from quire.grammar.json_schema.nodes import (
    Array,
    Bound,
    Number,
    Object,
    Option,
    Part,
    SchemaNode,
    Text,
    Values,
    children_of,
    is_anything,
)
from quire.grammar.json_schema.numbers import decimal_of
from quire.grammar.json_schema.patterns import all_but, for_library
from quire.grammar.json_schema.pruning import all_nodes, is_empty

_MOST_LEVELS = 32
"""The most levels of schemas within schemas; what is deeper is a definition."""
_MOST_REPEATED = 8
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = f"(?:{_LEAP_YEAR}-02-29|{_YEAR}-(?:02-(?:[01]|2[0-8])|0[13-9]|1[0-2]))"
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_STRICTER = {
    "date": f"^{_DAY}",
    "time": f"^{_NO_LEAP_SECOND}",
    "date-time": f"^{_DAY}.*[tT]{_NO_LEAP_SECOND}",
}
"""Patterns of formats for what libraries take in addition: days that a year does not have, and leap
seconds, which few readers take.
"""


class SchemaWriter:
    """Writes the nodes of a pruned graph. A node that is used more than once, or is in itself, is
    a definition that the places of its use refer to.
    """

    def __init__(self, root: SchemaNode) -> None:
        self._names: dict[int, str] = {}
        self._definitions: dict[str, Any] = {}
        self._waiting: list[tuple[str, SchemaNode]] = []
        self._shared = _shared_nodes(root)

    def document(self, root: SchemaNode) -> dict[str, Any]:
        """The schema of the root, which allows something, with the definitions that it needs."""
        schema = self._schema(root, 0)
        while self._waiting:
            name, node = self._waiting.pop()
            self._definitions[name] = self._schema(node, 0)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _use(self, node: SchemaNode, level: int) -> Any:
        """The schema of a node, or a reference to it."""
        is_plain = not node.options or is_anything(node)
        if is_plain or (id(node) not in self._shared and level < _MOST_LEVELS):
            return self._schema(node, level)
        if id(node) not in self._names:
            self._names[id(node)] = name = str(len(self._names) + 1)
            self._waiting.append((name, node))
        return {"$ref": f"#/$defs/{self._names[id(node)]}"}

    def _schema(self, node: SchemaNode, level: int) -> Any:
        if is_empty(node):
            return False
        if is_anything(node):
            return {}  # xgrammar takes no `true` among items
        choices = self._choices(node.options, level)
        return choices[0] if len(choices) == 1 else {"anyOf": choices}

    def _choices(self, options: Sequence[Option], level: int) -> list[Any]:
        found: list[Any] = []
        for option in options:
            if not isinstance(option, SchemaNode):
                found += self._part(option, level)
                continue
            used = self._use(option, level + 1)
            found += used["anyOf"] if used.keys() == {"anyOf"} else [used]
        return found

    def _part(self, part: Part, level: int) -> list[Any]:
        match part:
            case Values(values):
                return _listed(values)
            case Text():
                return [_text(part)]
            case Number():
                return [_number(part)]
            case Array():
                return [self._array(part, level)]
            case Object():
                return [self._object(part, level)]
        raise AssertionError("a node of everything has no parts to write")

    def _array(self, part: Array, level: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if part.prefix:
            schema["prefixItems"] = [self._use(node, level + 1) for node in part.prefix]
        if not is_anything(part.rest):
            schema["items"] = self._use(part.rest, level + 1)
        if part.fewest:
            schema["minItems"] = part.fewest
        if part.most is not None:
            schema["maxItems"] = part.most
        return schema

    def _object(self, part: Object, level: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        has_others = not is_empty(part.rest) or bool(part.patterns)
        properties = {
            name: self._use(node, level + 1)
            for name, node in part.properties.items()
            # where nothing else may come, leaving a forbidden name out says the same
            if has_others or not is_empty(node)
        }
        if properties:
            schema["properties"] = properties
        if part.required:
            schema["required"] = [name for name in part.properties if name in part.required]
        if part.patterns:
            schema["patternProperties"] = {
                for_library(pattern): self._use(node, level + 1)
                for pattern, node in part.patterns.items()
            }
        if not is_anything(part.rest):
            schema["additionalProperties"] = self._use(part.rest, level + 1)
        # libraries support these counts in few cases, so that they are left out where they say
        # nothing
        if part.fewest > len(part.required):
            schema["minProperties"] = part.fewest
        if part.most is not None and (has_others or part.most < len(properties)):
            schema["maxProperties"] = part.most
        return schema


def _listed(values: Sequence[Any]) -> list[Any]:
    """Values as schemas; those of types with few values as types."""
    found: list[Any] = []
    rest = [value for value in values if value is not None]
    if len(rest) < len(values):
        found.append({"type": "null"})
    if len({value for value in rest if isinstance(value, bool)}) == 2:
        found.append({"type": "boolean"})
        rest = [value for value in rest if not isinstance(value, bool)]
    if rest:
        found.append({"const": rest[0]} if len(rest) == 1 else {"enum": rest})
    return found


def _text(part: Text) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if part.shortest:
        schema["minLength"] = part.shortest
    if part.longest is not None:
        schema["maxLength"] = part.longest
    patterns = [*map(for_library, part.patterns)]
    if part.excluded and (others := all_but(part.excluded)) is not None:
        patterns.append(others)
    patterns += [_STRICTER[name] for name in part.formats if name in _STRICTER]
    rules = [{"pattern": pattern} for pattern in patterns]
    rules += [{"format": name} for name in part.formats]
    # a keyword stands once in an object; further ones of its kind need an allOf
    for rule in list(rules):
        if rule.keys().isdisjoint(schema):
            schema |= rule
            rules.remove(rule)
    return {**schema, "allOf": rules} if rules else schema


def _number(part: Number) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer" if part.is_integer else "number"}
    for bound, names in (
        (part.low, ("minimum", "exclusiveMinimum")),
        (part.high, ("maximum", "exclusiveMaximum")),
    ):
        if isinstance(bound, Bound):
            schema[names[bound.is_open]] = plain_number(bound.value)
    if part.multiple is not None:
        schema["multipleOf"] = plain_number(decimal_of(part.multiple))
    return schema


def plain_number(value: Decimal) -> int | float:
    """A number as JSON has it."""
    return int(value) if value == value.to_integral_value() else float(value)


def _shared_nodes(root: SchemaNode) -> set[int]:
    """The nodes that more than one place refers to, or that are within themselves."""
    nodes = all_nodes(root)
    uses = Counter([id(root)])
    for node in nodes:
        for option in node.options:
            uses.update(map(id, children_of(option)))
    # the root counts as used once, so that a reference back to it is seen
    return {id(n) for n in nodes if uses[id(n)] > 1 and not all(map(_is_short, n.options))}


def _is_short(option: Option) -> bool:
    """Whether it is written again rather than referred to."""
    if isinstance(option, Values):
        return len(option.values) <= _MOST_REPEATED and all(map(_is_scalar, option.values))
    return not isinstance(option, SchemaNode | Array | Object)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list | str) or isinstance(value, str) and len(value) < 64
