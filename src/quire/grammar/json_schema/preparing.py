"""Prepares a JSON schema for compilation, from its unfolding to what libraries read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.grammar.json_schema.lark import PLAIN_ESCAPES, LarkWriter, inexact_nodes
from quire.grammar.json_schema.nodes import Object, SchemaNode, Values
from quire.grammar.json_schema.openness import Openness
from quire.grammar.json_schema.patterns import PatternRules
from quire.grammar.json_schema.places import Document, SchemaError
from quire.grammar.json_schema.pruning import all_nodes, is_empty, leave_out_failed, prune
from quire.grammar.json_schema.unfolding import Unfolding
from quire.grammar.json_schema.writing import SchemaWriter

_NAMED_ESCAPES = frozenset("\b\t\n\f\r")


class PreparedSchema:
    """A schema that is unfolded, without what no value follows.

    `unenforced` are pointers to the keywords that are annotations here, and to the alternatives of
    an `anyOf` that are left out because they cannot be enforced. Making it raises SchemaError for a
    schema that is invalid, cannot be enforced, or that no value follows.
    """

    def __init__(self, schema: Any, openness: Openness, patterns: PatternRules) -> None:
        if not isinstance(schema, dict | bool):
            raise SchemaError("#", "a schema is an object, true or false")
        try:
            unfolding = Unfolding(Document(schema), openness, patterns)
            self._root = unfolding.root()
            # before pruning, which would take a failed node for one that nothing follows
            left_out = leave_out_failed(self._root, unfolding.alternatives)
            prune(self._root, patterns)
        except RecursionError:
            raise SchemaError("#", "its schemas lead too deep into each other") from None
        pointers = [*unfolding.atoms.unenforced, *left_out]
        self.unenforced = tuple(dict.fromkeys(pointers))
        if is_empty(self._root):
            kept = " without the alternatives that cannot be enforced" if left_out else ""
            raise SchemaError("#", f"no value follows it{kept}")
        nodes = all_nodes(self._root)
        self._has_plain_names = any(map(_takes_other_names, nodes))
        # PLAIN_ESCAPES holds for all strings of the schema, and such characters have no other
        # escape
        if self._has_plain_names and any(map(_has_control_characters, nodes)):
            reason = "values with control characters cannot be enforced next to open objects"
            raise SchemaError("#", reason)
        self._inexact = inexact_nodes(self._root)

    @property
    def is_exact(self) -> bool:
        """Whether `schema` says all of it: libraries read long numbers as others."""
        return not self._inexact

    def schema(self) -> dict[str, Any]:
        """The schema in the keywords that libraries enforce."""
        return SchemaWriter(self._root).document(self._root)

    def options(self, json_options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of llguidance that the schema needs in addition."""
        return {**json_options, **PLAIN_ESCAPES} if self._has_plain_names else dict(json_options)

    def lark(self, json_options: Mapping[str, Any]) -> str:
        """The grammar of the schema in Lark's notation, whatever its numbers."""
        options = self.options(json_options)
        if self.is_exact:
            return f"start: %json {json.dumps({**self.schema(), 'x-guidance': options})}"
        return LarkWriter(options, self._inexact).grammar(self._root)


def _takes_other_names(node: SchemaNode) -> bool:
    """Whether it has objects with properties next to those that are declared."""
    for option in node.options:
        if isinstance(option, Object) and (option.properties or option.patterns):
            others = [option.rest, *option.patterns.values()]
            if not all(map(is_empty, others)):
                return True
    return False


def _has_control_characters(node: SchemaNode) -> bool:
    listed = (option for option in node.options if isinstance(option, Values))
    return any(_is_odd(value) for option in listed for value in option.values)


def _is_odd(value: Any) -> bool:
    match value:
        case str():
            return any(char < " " and char not in _NAMED_ESCAPES for char in value)
        case list():
            return any(map(_is_odd, value))
        case dict():
            return any(map(_is_odd, value.values()))
    return False
