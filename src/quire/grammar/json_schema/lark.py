"""Writes an unfolded graph as a grammar in Lark's notation, where a schema would lose digits.

Only what leads to such numbers is written in rules; everything else stays a schema within them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.grammar.json_schema.nodes import (
    Array,
    Number,
    Object,
    Option,
    SchemaNode,
    Values,
    as_decimal,
    children_of,
)
from quire.grammar.json_schema.numbers import (
    EXACT_INTEGER,
    is_exact_float,
    is_exact_for_library,
    range_patterns,
)
from quire.grammar.json_schema.patterns import all_but
from quire.grammar.json_schema.places import SchemaError
from quire.grammar.json_schema.pruning import all_nodes, is_empty
from quire.grammar.json_schema.writing import SchemaWriter
from quire.grammar.regular import terminal

_NOTHING = '""'


def inexact_nodes(root: SchemaNode) -> set[int]:
    """The nodes that a schema would make something else of, and those that they are within."""
    nodes = all_nodes(root)
    parents: dict[int, list[SchemaNode]] = {}
    for node in nodes:
        for option in node.options:
            for child in children_of(option):
                parents.setdefault(id(child), []).append(node)
    found = [node for node in nodes if any(map(_is_inexact, node.options))]
    inexact = {id(node) for node in found}
    # whatever contains such a number cannot be a schema either
    while found:
        for parent in parents.get(id(found.pop()), ()):
            if id(parent) not in inexact:
                inexact.add(id(parent))
                found.append(parent)
    return inexact


def _is_inexact(option: Option) -> bool:
    match option:
        case Values(values):
            return any(_has_inexact(value) for value in values)
        case Number():
            return not is_exact_for_library(option)
    return False


def _has_inexact(value: Any) -> bool:
    match value:
        case bool() | None | str():
            return False
        case int():
            return abs(value) > EXACT_INTEGER
        case float():
            return not is_exact_float(as_decimal(value))
        case list():
            return any(map(_has_inexact, value))
    return any(map(_has_inexact, value.values()))


class LarkWriter:
    """Writes the nodes of a pruned graph as rules. `json_options` are the library's for schemas;
    `inexact` are the nodes that cannot be schemas.
    """

    def __init__(self, json_options: Mapping[str, Any], inexact: set[int]) -> None:
        self._options = dict(json_options)
        self._inexact = inexact
        self._names: dict[int, str] = {}
        self._rules: list[str] = []
        self._waiting: list[tuple[str, SchemaNode]] = []

    def grammar(self, root: SchemaNode) -> str:
        """The grammar of the root. Raises SchemaError for what rules cannot express."""
        start = self._use(root)
        while self._waiting:
            name, node = self._waiting.pop()
            self._rules.append(f"{name}: {self._alternatives(node)}")
        # one blank between two tokens, as in schemas: see WHITESPACE
        lines = ['%llguidance {"ignore_once": true}']
        if (blank := self._options.get("whitespace_pattern")) is not None:
            lines.append(f"%ignore {terminal(blank)}")
        return "\n".join([*lines, f"start: {start}", *self._rules])

    def _use(self, node: SchemaNode) -> str:
        """The expression of a node: a schema, or the name of its rule."""
        if id(node) not in self._inexact:
            schema = SchemaWriter(node).document(node)
            return f"%json {json.dumps({**schema, 'x-guidance': self._options})}"
        if id(node) not in self._names:
            self._names[id(node)] = name = f"v{len(self._names)}"
            self._waiting.append((name, node))
        return self._names[id(node)]

    def _rule(self, body: str, stem: str = "r") -> str:
        name = f"{stem}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _alternatives(self, node: SchemaNode) -> str:
        return " | ".join(self._option(option) for option in node.options)

    def _option(self, option: Option) -> str:
        match option:
            case SchemaNode():
                return self._use(option)
            case Values(values):
                return " | ".join(map(_literal, values))
            case Number() if not is_exact_for_library(option):
                return self._rule(" & ".join(map(terminal, range_patterns(option))), "N")
            case Array():
                return self._array(option)
            case Object():
                return self._object(option)
        return self._use(SchemaNode([option]))

    def _array(self, part: Array) -> str:
        """The items from the last to the first: each is followed by those after it, or by none."""
        known = len(part.prefix)
        tail = "" if is_empty(part.rest) else self._more(part, known)
        for index in range(known - 1, -1, -1):
            item = f"{self._use(part.prefix[index])} {tail}"
            item = item if index == 0 else f'"," {item}'
            tail = self._rule(item if index < part.fewest else f"({item})?")
        if not known and tail:
            items = f"{self._use(part.rest)} {self._more(part, 1)}"
            tail = items if part.fewest else f"({items})?"
        return f'"[" {tail} "]"'

    def _more(self, part: Array, known: int) -> str:
        """The items after `known` ones, each with a comma before it."""
        fewest = max(part.fewest - known, 0)
        if part.most is not None and part.most <= known:
            return ""
        most = "" if part.most is None else str(part.most - known)
        return f'("," {self._use(part.rest)}){{{fewest},{most}}}'

    def _object(self, part: Object) -> str:
        """The properties from last to first, each where others came before and where none did."""
        self._refuse_counted(part)
        first, more = self._others(part)
        for name, node in reversed(part.properties.items()):
            if is_empty(node):
                continue
            item = f'{_literal(name)} ":" {self._use(node)}'
            rest = self._named(more)
            if name in part.required:
                first, more = f"{item} {rest}", f'"," {item} {rest}'
            else:
                first = f"{item} {rest} | {self._named(first)}"
                more = f'("," {item})? {rest}'
        return f'"{{" {self._named(first)} "}}"'

    def _named(self, body: str) -> str:
        return body if body == _NOTHING else self._rule(body)

    def _others(self, part: Object) -> tuple[str, str]:
        """The properties that are not declared: first in their object, and after others."""
        if is_empty(part.rest):
            return _NOTHING, _NOTHING
        key: dict[str, Any] = {"type": "string"}
        if part.properties:
            key["pattern"] = all_but(part.properties)
        options = {**self._options, **PLAIN_ESCAPES}
        name = f"%json {json.dumps({**key, 'x-guidance': options})}"
        item = self._rule(f'{name} ":" {self._use(part.rest)}')
        return f'({item} ("," {item})*)?', f'("," {item})*'

    def _refuse_counted(self, part: Object) -> None:
        is_counted = part.most is not None or part.fewest > len(part.required)
        has_long_names = all_but(part.properties) is None and not is_empty(part.rest)
        if part.patterns or is_counted or has_long_names:
            reason = (
                "numbers of so many digits cannot be enforced in an object with patternProperties, "
                "minProperties, maxProperties or very long names"
            )
            raise SchemaError("#", reason)


PLAIN_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
"""An option of the library: no letter is written as a number, so that a name has one spelling."""


def _literal(value: Any) -> str:
    """The text of a value, which nothing but this is allowed for."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(text, ensure_ascii=False)
