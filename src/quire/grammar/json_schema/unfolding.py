"""Unfolds a schema: follows its references, joins what has to hold together, and closes objects.

A node belongs to the atoms that hold together for a value. What a property of it has to follow is
again such a list: the schemas for its name, from each atom that has one. There are no more lists
than sets of places in the schema, and a reference that leads back comes to a list that is known, so
this ends, and nothing of a schema is left out on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.grammar.json_schema.atoms import Atom, Atoms
from quire.grammar.json_schema.comparing import (
    are_disjoint,
    avoidable_property,
    telling_property,
    without_shared,
)
from quire.grammar.json_schema.containers import array_part, object_part
from quire.grammar.json_schema.keywords import KINDS
from quire.grammar.json_schema.nodes import (
    Anything,
    Option,
    Part,
    SchemaNode,
    Values,
    allows,
    key_of,
)
from quire.grammar.json_schema.numbers import unsupported
from quire.grammar.json_schema.openness import Openness
from quire.grammar.json_schema.patterns import NotComparable, PatternRules
from quire.grammar.json_schema.places import Document, SchemaError, UnsupportedSchema, joined
from quire.grammar.json_schema.scalars import number_part, text_part

_MOST_ATOMS = 100_000
"""The most atoms that the nodes of a schema may have together."""
_SAYS_IF_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})


class Unfolding:
    """The nodes of one document, each made when it is first asked for."""

    def __init__(
        self,
        document: Document,
        openness: Openness,
        patterns: PatternRules,
        *,
        is_reference: bool = False,
    ) -> None:
        """`is_reference`: values are compared with it, and texts are not made of it."""
        self.atoms = Atoms(document)
        self.alternatives: dict[tuple[SchemaNode, SchemaNode], str] = {}
        """Pointers to alternatives of `anyOf` and `oneOf`, by the node with them and their own."""
        self._openness = openness
        self._nodes: dict[tuple[Atom, ...], SchemaNode] = {}
        self._num_atoms = 0
        self._is_reference = is_reference
        self._standard = (
            self
            if is_reference
            else Unfolding(document, Openness.OPEN, patterns, is_reference=True)
        )
        self._patterns = patterns

    def root(self) -> SchemaNode:
        """Return the node of the document; all that it leads to is made.

        Raises SchemaError for what is invalid or cannot be enforced.
        """
        place = self.atoms.document.root
        node = self.node([Atom("schema", place)])
        made = 0
        try:
            # making a node adds others, until references lead back to known ones
            while made < len(self._nodes):
                new = list(self._nodes)[made:]
                for atoms in new:
                    place = atoms[0].place if atoms else place
                    self._nodes[atoms].make()
                made += len(new)
        except NotComparable as error:
            raise place.unsupported(str(error)) from None
        return node

    def node(self, atoms: Sequence[Atom]) -> SchemaNode:
        try:
            key = self.atoms.flattened(atoms)
        except UnsupportedSchema as error:
            return SchemaNode(failure=error)
        if key is None:
            return SchemaNode()
        if key not in self._nodes:
            # counted before the node is made, so that the bound holds for memory too
            self._num_atoms += len(key) + 1
            if self._num_atoms > _MOST_ATOMS:
                raise SchemaError("#", "it unfolds to too many schemas")
            # known before its options are made, which may lead back to it
            self._nodes[key] = SchemaNode(make=lambda: self._options(key))
        return self._nodes[key]

    def standard_node(self, atoms: Sequence[Atom]) -> SchemaNode:
        return self._standard.node(atoms)

    def _options(self, atoms: tuple[Atom, ...]) -> list[Option]:
        if not atoms:
            return [Anything()]
        for index, atom in enumerate(atoms):
            if atom.kind in ("choice", "dependent"):
                before, after = atoms[:index], atoms[index + 1 :]
                alternatives = self.atoms.alternatives(atom)
                if atom.name == "oneOf":
                    found = self._exclusive(atom, before, alternatives, after)
                else:
                    found = [self.node([*before, *each, *after]) for each in alternatives]
                if atom.kind == "choice":
                    self._note_alternatives(self._nodes[atoms], atom, alternatives, found)
                return [*found]
        return self._parts(atoms)

    def _note_alternatives(
        self,
        node: SchemaNode,
        choice: Atom,
        alternatives: Sequence[Sequence[Atom]],
        found: Sequence[SchemaNode],
    ) -> None:
        """Note where the alternatives of a node are; of several together, where all are."""
        for each, alternative in zip(alternatives, found, strict=False):
            of_all = joined(choice.place.pointer, choice.name)
            pointer = each[0].place.pointer if len(each) == 1 else of_all
            self.alternatives.setdefault((node, alternative), pointer)

    def _exclusive(
        self,
        choice: Atom,
        before: Sequence[Atom],
        alternatives: Sequence[Sequence[Atom]],
        after: Sequence[Atom],
    ) -> list[SchemaNode]:
        """The nodes of a `oneOf`: of values that follow one alternative and no other.

        Where two overlap only because neither needs to have the property that tells them apart, it
        is required; where one needs a property that the other may do without, it does without.
        """
        standard = [self.standard_node(each) for each in alternatives]
        found: list[SchemaNode] = []
        for index, each in enumerate(alternatives):
            node = self.node([*before, *each, *after])
            others = [(at, other) for at, other in enumerate(standard) if at != index]
            others = [(at, other) for at, other in others if not are_disjoint(node, other)]
            needed = [self._distinction(choice, node, other) for _, other in others]
            told = [atom for atom in needed if atom is not None]
            node = self.node([*before, *each, *after, *told])
            for at, other in others:
                if not are_disjoint(node, other):
                    node = without_shared(node, other)
                if not are_disjoint(node, other):
                    if self._is_reference:
                        return [SchemaNode(standard, is_loose=True)]
                    places = f"{min(index, at)} and {max(index, at)}"
                    reason = f"alternatives {places} of oneOf may overlap; anyOf allows that"
                    raise choice.place.unsupported(reason)
            found.append(node)
        return found

    def _distinction(self, choice: Atom, node: SchemaNode, other: SchemaNode) -> Atom | None:
        """A constraint that keeps the objects of a node from being those of another alternative."""
        if (name := telling_property(node, other)) is not None:
            return Atom("require", choice.place, name)
        if (name := avoidable_property(node, other)) is not None:
            return Atom("forbid", choice.place, name)
        return None

    def _parts(self, atoms: Sequence[Atom]) -> list[Option]:
        """The parts of a value that these atoms allow, without a choice among them."""
        owns = [atom for atom in atoms if atom.kind == "own"]
        facets = [self.atoms.own(atom) for atom in owns]
        listed = [[own["const"]] for own in facets if "const" in own]
        listed += [own["enum"] for own in facets if "enum" in own]
        if not listed:
            return [*self._typed_parts(atoms, owns)]
        # The values of an enum are as they are: what closes objects does not apply to them.
        allowed = SchemaNode([*self._standard._typed_parts(atoms, owns)])
        excluded = {key_of(value) for value in self._excluded(atoms)}
        keys = [{key_of(value) for value in values} for values in listed[1:]]
        chosen = {
            key: value
            for value in listed[0]
            if (key := key_of(value)) not in excluded
            and all(key in each for each in keys)
            and allows(allowed, value)
        }
        return [Values(tuple(chosen.values()))]

    def _typed_parts(self, atoms: Sequence[Atom], owns: Sequence[Atom]) -> Iterator[Part]:
        kinds = KINDS.intersection(
            *(atom.name for atom in atoms if atom.kind == "kinds"),
            *(k for atom in owns if (k := self.atoms.keywords(atom.place).kinds) is not None),
        )
        facets = [self.atoms.own(atom) for atom in owns]
        excluded = self._excluded(atoms)
        keys = {key_of(value) for value in excluded}
        plain: list[Any] = [None] * ("null" in kinds) + [True, False] * ("boolean" in kinds)
        if plain := [value for value in plain if key_of(value) not in keys]:
            yield Values(tuple(plain))
        if not self._is_reference:
            self._check_patterns(owns)
        if "string" in kinds and (text := text_part(facets)) is not None:
            strings = [value for value in excluded if isinstance(value, str)]
            yield replace(text, excluded=tuple(dict.fromkeys(strings)))
        self._refuse_others(atoms, excluded, kinds)
        if "integer" in kinds and (number := number_part(facets, "fraction" not in kinds)):
            if (reason := unsupported(number)) is not None and not self._is_reference:
                raise atoms[0].place.unsupported(reason)
            yield number
        if "array" in kinds and (array := array_part(self, owns)) is not None:
            yield array
        if "object" in kinds:
            is_closed = self._is_closed(owns)
            made = object_part(self, atoms, owns, is_closed=is_closed)
            if made is not None:
                yield made

    def _check_patterns(self, owns: Sequence[Atom]) -> None:
        for atom in owns:
            own = self.atoms.own(atom)
            given = [own["pattern"]] if "pattern" in own else []
            for pattern in [*given, *own.get("patternProperties", ())]:
                if (reason := self._patterns.error_of(pattern)) is not None:
                    shown = f"the pattern {pattern[:80]!r} is not supported: {reason}"
                    raise atom.place.unsupported(shown)

    def _is_closed(self, owns: Sequence[Atom]) -> bool:
        """Whether an object has no properties but those that are declared, because the schemas that
        hold together for it declare some and do not say whether there are others.
        """
        each = [self.atoms.keywords(atom.place) for atom in owns]
        if self._openness is Openness.OPEN or any(_SAYS_IF_OPEN & one.own.keys() for one in each):
            return False
        if any("properties" in one.own for one in each):
            return True
        is_object = any("object" in (one.kinds or ()) for one in each)
        return is_object and self._openness is Openness.SHUT

    def _excluded(self, atoms: Sequence[Atom]) -> list[Any]:
        found: list[Any] = []
        for atom in atoms:
            if atom.kind == "without":
                schema = atom.place.schema
                assert isinstance(schema, dict)
                found += [schema["const"]] if "const" in schema else schema["enum"]
        return found

    def _refuse_others(
        self, atoms: Sequence[Atom], excluded: Sequence[Any], kinds: frozenset[str]
    ) -> None:
        """Raise for what masks cannot leave out: numbers, lists and objects."""
        is_number = any(type(value) in (int, float) for value in excluded)
        if (
            (is_number and "integer" in kinds)
            or ("array" in kinds and any(isinstance(value, list) for value in excluded))
            or ("object" in kinds and any(isinstance(value, dict) for value in excluded))
        ):
            place = next(atom.place for atom in atoms if atom.kind == "without")
            raise place.unsupported("only texts, true, false and null can be left out by not")
        if "fraction" in kinds and "integer" not in kinds:
            raise atoms[0].place.unsupported("numbers that are not integers cannot be asked for")
