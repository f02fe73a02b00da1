"""Joins what several schemas say of lists, and of objects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

from quire.grammar.json_schema.atoms import Atom, Atoms
from quire.grammar.json_schema.nodes import (
    Anything,
    Array,
    Object,
    SchemaNode,
    Text,
    Values,
    allows,
    parts_of,
)
from quire.grammar.json_schema.patterns import found_in
from quire.grammar.json_schema.scalars import joint_counts


class Nodes(Protocol):
    """The source of nodes for inner values."""

    atoms: Atoms

    def node(self, atoms: Sequence[Atom]) -> SchemaNode:
        """The node of atoms that hold together."""

    def standard_node(self, atoms: Sequence[Atom]) -> SchemaNode:
        """The node as the standard reads it, where objects are open."""


def array_part(nodes: Nodes, owns: Sequence[Atom]) -> Array | None:
    """The lists that follow all of these schemas; None: there are none."""
    facets = [nodes.atoms.own(atom) for atom in owns]
    if (counts := joint_counts(facets, "minItems", "maxItems")) is None:
        return None
    given = [_items(nodes.atoms, atom) for atom in owns]
    given += _unevaluated_items(nodes.atoms, owns, given)
    prefixes = [[*prefix] for prefix, _ in given]
    longest = max(map(len, prefixes), default=0)
    for prefix, (_, rest) in zip(prefixes, given, strict=True):
        prefix += [rest] * (longest - len(prefix))
    columns = zip_longest(*prefixes)
    first = [nodes.node([atom for atom in each if atom is not None]) for each in columns]
    return Array(first, nodes.node([rest for _, rest in given if rest is not None]), *counts)


_Items = tuple[list[Atom | None], Atom | None]
"""Rules for the first items of a list one by one, and for all that follow."""


def _items(atoms: Atoms, atom: Atom) -> _Items:
    own = atoms.own(atom)
    prefix, rest = "prefixItems", "items"
    if isinstance(own.get("items"), list):  # as before draft 2020-12
        prefix, rest = "items", "additionalItems"
    first: list[Atom | None] = [
        atoms.below(atom, prefix, index) for index in range(len(own.get(prefix, ())))
    ]
    return first, atoms.below(atom, rest) if rest in own else None


def _unevaluated_items(atoms: Atoms, owns: Sequence[Atom], given: Sequence[_Items]) -> list[_Items]:
    """The rules of `unevaluatedItems`, each for items that the schemas in its scope leave."""
    found: list[_Items] = []
    for atom in owns:
        if _decides(atoms, atom, owns, "unevaluatedItems"):
            scope = [i for each, i in zip(owns, given, strict=True) if each.is_within(atom)]
            # an `items` evaluates all items, so that nothing is left
            if all(rest is None for _, rest in scope):
                known = max(len(prefix) for prefix, _ in scope)
                found.append(([None] * known, atoms.below(atom, "unevaluatedItems")))
    return found


def _decides(atoms: Atoms, atom: Atom, owns: Sequence[Atom], keyword: str) -> bool:
    """Whether a schema has the keyword, and none that it joins has it too and so leaves nothing."""
    if keyword not in atoms.own(atom):
        return False
    having = (each for each in owns if each.is_within(atom) and keyword in atoms.own(each))
    return [*having] == [atom]


def object_part(
    nodes: Nodes, atoms: Sequence[Atom], owns: Sequence[Atom], *, is_closed: bool
) -> Object | None:
    """The objects that follow all of these atoms; None: there are none. `owns` are the schemas
    among them, `is_closed`: no property may come that is not declared.
    """
    facets = [nodes.atoms.own(atom) for atom in owns]
    if (counts := joint_counts(facets, "minProperties", "maxProperties")) is None:
        return None
    declared = [name for own in facets for name in own.get("properties", ())]
    required = [name for own in facets for name in own.get("required", ())]
    required += [atom.name for atom in atoms if atom.kind == "require"]
    forbidden = [atom.name for atom in atoms if atom.kind == "forbid"]
    rules = _PropertyRules(nodes, owns, is_closed=is_closed)
    names = dict.fromkeys([*declared, *required, *forbidden, *rules.listed])
    properties = {
        name: SchemaNode() if name in forbidden else rules.node_of(name) for name in names
    }
    patterns, rest = rules.others()
    return Object(properties, rest, frozenset(required), patterns, *counts)


class _PropertyRules:
    """The rules for the properties of an object, from schemas that hold together."""

    def __init__(self, nodes: Nodes, owns: Sequence[Atom], *, is_closed: bool) -> None:
        self._nodes = nodes
        self._owns = owns
        self._facets = [nodes.atoms.own(atom) for atom in owns]
        self._is_closed = is_closed
        self._declaring: dict[str | None, list[int]] = {}
        for index, own in enumerate(self._facets):
            for name in own.get("properties", ()):
                self._declaring.setdefault(name, []).append(index)
        self._general = [
            index
            for index, own in enumerate(self._facets)
            if "patternProperties" in own or "additionalProperties" in own
        ]
        self._unevaluated = [
            atom for atom in owns if _decides(nodes.atoms, atom, owns, "unevaluatedProperties")
        ]
        self._allowed_names = nodes.standard_node(self._atoms_of("propertyNames"))
        self._name_pattern: str | None = None
        self.listed: list[str] = []
        """The names that `propertyNames` lists, where there may be others than those declared."""
        self._takes_any_name = any(
            isinstance(part, Anything) or part == Text() for part in parts_of(self._allowed_names)
        )
        if not (is_closed or self._takes_any_name):
            self._read_names()

    def node_of(self, name: str) -> SchemaNode:
        return self._node(name=name) if allows(self._allowed_names, name) else SchemaNode()

    def others(self) -> tuple[dict[str, SchemaNode], SchemaNode]:
        """The nodes of further properties by patterns of their names, and of all that are left."""
        if self._is_closed:
            return {}, SchemaNode()
        if self._takes_any_name:
            found = dict.fromkeys(
                p for own in self._facets for p in own.get("patternProperties", ())
            )
            return {pattern: self._node(pattern=pattern) for pattern in found}, self._node()
        if self._name_pattern is None:
            return {}, SchemaNode()
        return {self._name_pattern: self._node()}, SchemaNode()

    def _node(self, *, name: str | None = None, pattern: str | None = None) -> SchemaNode:
        """The node of a property, of those with a pattern, or of those that nothing is said of."""
        found: list[Atom] = []
        saying = set()
        for index in sorted({*self._general, *self._declaring.get(name, ())}):
            atom = self._owns[index]
            for steps in _steps_to(self._facets[index], name, pattern):
                saying.add(index)
                found.append(self._nodes.atoms.below(atom, *steps))
        for atom in self._unevaluated:
            if not any(self._owns[index].is_within(atom) for index in saying):
                found.append(self._nodes.atoms.below(atom, "unevaluatedProperties"))
        return self._nodes.node(found)

    def _atoms_of(self, keyword: str) -> list[Atom]:
        having = (a for a, own in zip(self._owns, self._facets, strict=True) if keyword in own)
        return [self._nodes.atoms.below(atom, keyword) for atom in having]

    def _read_names(self) -> None:
        parts = parts_of(self._allowed_names)
        texts = [part for part in parts if isinstance(part, Text)]
        values = [value for part in parts if isinstance(part, Values) for value in part.values]
        self.listed = [value for value in values if isinstance(value, str)]
        if not texts:
            return
        pattern = _pattern_of(texts[0]) if len(texts) == 1 and not self.listed else None
        if pattern is None or any("patternProperties" in own for own in self._facets):
            place = self._atoms_of("propertyNames")[0].place
            allowed = "an enum, a pattern or a length, without patternProperties next to it"
            raise place.unsupported(f"propertyNames is supported for {allowed}")
        self._name_pattern = pattern


def _steps_to(own: dict[str, Any], name: str | None, pattern: str | None) -> list[tuple[str, ...]]:
    """The steps from a schema to those that it has for a property."""
    found = [("properties", name)] if name is not None and name in own.get("properties", ()) else []
    for known in own.get("patternProperties", ()):
        if known == pattern or (name is not None and found_in(known, name)):
            found.append(("patternProperties", known))
    if not found and "additionalProperties" in own:
        return [("additionalProperties",)]
    return [*found]


def _pattern_of(text: Text) -> str | None:
    """A pattern for the same texts; None: there is none."""
    has_length = text.shortest > 0 or text.longest is not None
    if text.formats or text.excluded or len(text.patterns) + has_length > 1:
        return None
    if text.patterns:
        return text.patterns[0]
    # a dot means a character of JSON's string, line ends as well
    return f"^(?s:.{{{text.shortest},{'' if text.longest is None else text.longest}}})$"
