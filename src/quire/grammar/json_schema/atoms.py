"""Constraints that hold together: schemas taken apart, references followed and `allOf` joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from quire.grammar.json_schema.keywords import KINDS, Keywords, keywords_of
from quire.grammar.json_schema.places import Document, Place, joined

_MOST_JOINED = 4
"""The most alternatives that are joined with each other, in 15 ways."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A constraint on a value, by its kind:

    schema: all keywords of a place; own: those that apply to the value itself; choice: its `anyOf`
    or `oneOf` (`name`); dependent: a rule for the presence of a property (`name`: keyword and
    property); kinds: the types in `name`; require, forbid: the property `name`; without: none of
    the values in the `not` of the place. `via`: the pointers of the places whose keywords have led
    here, where that matters.
    """

    kind: str
    place: Place
    name: Any = None
    via: frozenset[str] = frozenset()

    def is_within(self, outer: Atom) -> bool:
        """Whether the place is joined by another one, or is it; `via` has to be known."""
        return outer.place.pointer in self.via


class Atoms:
    """Takes the schemas of a document apart. Its methods raise SchemaError for those that are
    invalid or cannot be enforced.

    `unenforced` are pointers to the keywords that were left out as annotations, of the places that
    were met.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.unenforced: dict[str, None] = {}
        self._keywords: dict[str, Keywords] = {}
        # the way to a place multiplies the atoms, and only these keywords ask for it
        self._tracks = _has_unevaluated(document.root.schema)

    def own(self, atom: Atom) -> dict[str, Any]:
        """Return the keywords of an atom's place that apply to the value itself."""
        return self.keywords(atom.place).own

    def keywords(self, place: Place) -> Keywords:
        """Return the keywords of a place whose schema is an object."""
        if place.pointer not in self._keywords:
            if self._tracks and "if" in place.schema:  # type: ignore[operator]
                reason = "a condition cannot be enforced in a schema with unevaluated keywords"
                raise place.unsupported(reason)
            alone = self.document.is_old(place.resource)
            self._keywords[place.pointer] = keywords_of(place, ref_stands_alone=alone)
            for name in self._keywords[place.pointer].unenforced:
                self.unenforced[joined(place.pointer, name)] = None
        return self._keywords[place.pointer]

    def below(self, atom: Atom, *steps: str | int) -> Atom:
        """Make the atom of a schema within that of another one."""
        return Atom("schema", self.document.child(atom.place, *steps))

    def flattened(self, atoms: Iterable[Atom]) -> tuple[Atom, ...] | None:
        """Replace every schema by what it consists of; None: nothing follows them all."""
        found: dict[tuple[str, str, Any], Atom] = {}
        for atom in atoms:
            for each in [atom] if atom.kind != "schema" else self._parts(atom, []):
                if each is None:
                    return None
                # a schema that is reached on two ways is the same constraint
                found.setdefault((each.kind, each.place.pointer, each.name), each)
        return tuple(found.values())

    def alternatives(self, atom: Atom) -> list[list[Atom]]:
        """Return the lists of atoms one of which has to hold, for a choice or a dependent one.

        What several alternatives of an `anyOf` say together counts where a schema asks what was
        not said, so these are further lists.
        """
        place = atom.place
        assert isinstance(place.schema, dict)
        if atom.kind == "choice":
            each = [
                Atom("schema", self.document.child(place, atom.name, index), via=atom.via)
                for index in range(len(place.schema[atom.name]))
            ]
            is_joined = self._tracks and atom.name == "anyOf" and len(each) <= _MOST_JOINED
            sizes = range(1, len(each) + 1 if is_joined else 2)
            return [[*chosen] for size in sizes for chosen in combinations(each, size)]
        keyword, trigger = atom.name
        rule = place.schema[keyword][trigger]
        present = Atom("require", place, trigger)
        if isinstance(rule, list):
            then = [Atom("require", place, name) for name in rule]
        else:
            then = [Atom("schema", self.document.child(place, keyword, trigger), via=atom.via)]
        # a choice of two: the rule says nothing of an object without the property
        return [[Atom("forbid", place, trigger)], [present, *then]]

    def _parts(self, atom: Atom, path: list[Place]) -> Iterator[Atom | None]:
        """The atoms of a schema that was reached on `path`; None: nothing follows it."""
        place = atom.place
        # a `$ref` to what it is part of, without an object or a list between: it would never end
        if place in path:
            raise place.error("it refers to itself without an end")
        if isinstance(place.schema, bool):
            if not place.schema:
                yield None
            return
        keywords = self.keywords(place)
        via = atom.via | {place.pointer} if self._tracks else atom.via
        own = Atom("own", place, via=via) if keywords.own else None
        for name in place.schema:
            if own is not None and name == "properties":  # they come in this order in a text
                yield own
                own = None
            if name in keywords.combining:
                yield from self._joined(place, name, via, [*path, place])
        if own is not None:
            yield own

    def _joined(
        self, place: Place, name: str, via: frozenset[str], path: list[Place]
    ) -> Iterator[Atom | None]:
        """The atoms that a keyword joins to those of its place."""
        assert isinstance(place.schema, dict)
        value = place.schema[name]
        if name == "$ref":
            yield from self._parts(Atom("schema", self.document.target(place), via=via), path)
        elif name == "allOf":
            for index in range(len(value)):
                inner = self.document.child(place, name, index)
                yield from self._parts(Atom("schema", inner, via=via), path)
        elif name in ("anyOf", "oneOf"):
            yield Atom("choice", place, name, via)
        elif name == "not":
            yield from self._negated(self.document.child(place, name))
        else:
            for trigger in value:
                yield Atom("dependent", place, (name, trigger), via)

    def _negated(self, place: Place) -> Iterator[Atom | None]:
        """The atoms of a `not` whose schema is at `place`."""
        schema = place.schema
        if schema is False:
            return
        if schema is True or not schema:
            yield None
            return
        kinds = self.keywords(place).kinds
        if schema.keys() == {"type"}:
            assert kinds is not None
            yield Atom("kinds", place, KINDS - kinds)
        elif schema.keys() in ({"enum"}, {"const"}):
            yield Atom("without", place)
        elif schema.keys() == {"anyOf"}:
            for index in range(len(schema["anyOf"])):
                yield from self._negated(self.document.child(place, "anyOf", index))
        elif (
            schema.keys() <= {"required", "type"}
            and schema.get("type", "object") == "object"
            and len(schema["required"]) == 1
        ):
            yield Atom("kinds", place, frozenset({"object"}))
            yield Atom("forbid", place, schema["required"][0])
        else:
            allowed = "a type, a const, an enum, one required property, or anyOf with these"
            raise place.unsupported(f"not is supported for {allowed}")


def _has_unevaluated(value: Any) -> bool:
    """Whether a keyword, or anything else, is named like those that need to know of others."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if not found.keys().isdisjoint(("unevaluatedItems", "unevaluatedProperties")):
                return True
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    return False
