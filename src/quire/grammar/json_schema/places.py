"""The schemas within a JSON schema: where each stands, and where a reference leads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from quire.grammar.library import GrammarError

Schema = dict[str, Any] | bool

ONE_SCHEMA = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
    *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMAS_BY_NAME = (
    *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"),
    "properties",
)
"""The keywords with schemas in them. The keys of the last are names; all else are values."""

_OLD_DRAFTS = re.compile(r"https?://json-schema\.org/draft-0[1-7]/")


class SchemaError(GrammarError):
    """A schema is invalid, or asks for what cannot be enforced; the text names the place."""

    def __init__(self, pointer: str, reason: str) -> None:
        self.pointer = pointer
        super().__init__(reason if pointer == "#" else f"at {_in_short(pointer)}: {reason}")


class UnsupportedSchema(SchemaError):
    """A schema is valid, and cannot be enforced."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One schema of a document. `resource` is the pointer that its references are relative to: the
    root, or a schema with an `$id` of its own.
    """

    pointer: str
    schema: Schema
    resource: str

    def error(self, reason: str, *steps: str | int) -> SchemaError:
        """Make the error of this place, or of one below, for what is invalid."""
        return SchemaError(joined(self.pointer, *steps), reason)

    def unsupported(self, reason: str, *steps: str | int) -> UnsupportedSchema:
        """Make the error of this place, or of one below, for what cannot be enforced."""
        return UnsupportedSchema(joined(self.pointer, *steps), reason)


class Document:
    """A schema with all that it consists of. Nothing outside of it is ever read."""

    def __init__(self, schema: Schema) -> None:
        self.root = Place("#", schema, "#")
        self._places = {"#": self.root}
        self._names: dict[tuple[str, str], str] | None = None

    def is_old(self, resource: str) -> bool:
        """Whether a resource declares a draft in which nothing next to a `$ref` counts."""
        for pointer in (resource, "#"):
            schema = self._places[pointer].schema if pointer in self._places else None
            declared = schema.get("$schema") if isinstance(schema, dict) else None
            if isinstance(declared, str):
                return _OLD_DRAFTS.match(declared) is not None
        return False

    def child(self, place: Place, *steps: str | int) -> Place:
        """Return the schema below `place` at a keyword, and the name or index in it.

        Raises SchemaError if there is none.
        """
        pointer = joined(place.pointer, *steps)
        if pointer not in self._places:
            value: Any = place.schema
            for step in steps:
                value = value[step]
            if not isinstance(value, dict | bool):
                raise SchemaError(pointer, "a schema is an object, true or false")
            resource = self._resource(pointer, value, place.resource)
            self._places[pointer] = Place(pointer, value, resource)
        return self._places[pointer]

    def target(self, place: Place) -> Place:
        """Return the schema that the `$ref` of a place leads to. Raises SchemaError."""
        assert isinstance(place.schema, dict)
        reference = place.schema["$ref"]
        if not isinstance(reference, str):
            raise place.error("it must be a text", "$ref")
        base, fragment = urldefrag(reference)
        resource = place.resource if not base else self._resource_of(place, base)
        # in a URI a pointer is percent-encoded (RFC 6901, 6)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            pointer = self._known_names.get((resource, "#" + fragment))
            if pointer is None:
                raise place.error(f"there is no anchor {fragment[:80]!r}", "$ref")
            return self._places[pointer]
        return self._walk(place, self._places[resource], fragment)

    def _walk(self, place: Place, at: Place, fragment: str) -> Place:
        value: Any = at.schema
        pointer, resource = at.pointer, at.resource
        for step in fragment.split("/")[1:]:
            # in this order: ~01 is ~1 (RFC 6901, 4)
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            elif isinstance(value, dict) and step in value:
                value = value[step]
            else:
                reference = place.schema["$ref"]  # type: ignore[index]
                raise place.error(f"{reference[:80]!r} leads nowhere", "$ref")
            pointer = joined(pointer, step)
            resource = self._resource(pointer, value, resource)
        if pointer not in self._places:
            if not isinstance(value, dict | bool):
                raise place.error("it leads to what is not a schema", "$ref")
            self._places[pointer] = Place(pointer, value, resource)
        return self._places[pointer]

    def _resource(self, pointer: str, value: Any, around: str) -> str:
        """The resource that a schema belongs to, within one of `around`."""
        own = value.get("$id") if isinstance(value, dict) else None
        # drafts 6 and 7 have anchors in this form
        if not isinstance(own, str) or own.startswith("#"):
            return around
        return around if "$ref" in value and self.is_old(around) else pointer

    def _resource_of(self, place: Place, base: str) -> str:
        names = self._known_names
        uri = urljoin(self._uris[place.resource], base)
        if (uri, "") not in names:
            reason = f"{base[:80]!r} is another document, and nothing is fetched"
            raise place.unsupported(reason, "$ref")
        return names[uri, ""]

    @property
    def _known_names(self) -> dict[tuple[str, str], str]:
        """The pointers of resources by (URI, ""), and of anchors by (resource, "#name")."""
        if self._names is None:
            self._names, self._uris = {}, {"#": ""}
            for place in self._all_places():
                self._note_names(place)
        return self._names

    def _note_names(self, place: Place) -> None:
        assert self._names is not None
        if not isinstance(place.schema, dict):
            return
        if isinstance(own := place.schema.get("$id"), str):
            outer = self._uris.get(place.resource, "")
            uri = urldefrag(urljoin(outer, own))[0]
            if place.resource == place.pointer:
                self._uris[place.pointer] = uri
                self._names.setdefault((uri, ""), place.pointer)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := place.schema.get(keyword), str):
                self._names.setdefault((place.resource, "#" + name), place.pointer)

    def _all_places(self) -> Iterator[Place]:
        waiting = [(self.root, "")]
        while waiting:
            place, outer = waiting.pop()
            if place.resource == place.pointer:  # its `$id` is relative to the one around
                self._uris.setdefault(place.pointer, outer)
            yield place
            uri = self._uris[place.resource]
            waiting += [(self.child(place, *steps), uri) for steps in subschemas(place.schema)]


def subschemas(schema: Schema) -> Iterator[tuple[str | int, ...]]:
    """The steps from a schema to each of those directly in it, names and values told apart."""
    if not isinstance(schema, dict):
        return
    for keyword in ONE_SCHEMA:
        if isinstance(schema.get(keyword), dict | bool):
            yield (keyword,)
    for keyword in LISTS_OF_SCHEMAS:
        if isinstance(found := schema.get(keyword), list):
            yield from ((keyword, i) for i, one in enumerate(found) if isinstance(one, dict | bool))
    for keyword in SCHEMAS_BY_NAME:
        if isinstance(found := schema.get(keyword), dict):
            yield from ((keyword, n) for n, one in found.items() if isinstance(one, dict | bool))


def open_place(schema: Schema) -> str | None:
    """The pointer to a schema within this one whose `additionalProperties` are true, or None."""
    waiting: list[tuple[str, Schema]] = [("#", schema)]
    while waiting:
        pointer, found = waiting.pop()
        if isinstance(found, dict) and found.get("additionalProperties") is True:
            return pointer
        for steps in subschemas(found):
            inner: Any = found
            for step in steps:
                inner = inner[step]
            waiting.append((joined(pointer, *steps), inner))
    return None


def joined(pointer: str, *steps: str | int) -> str:
    """The pointer to what is below another one."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "/".join((pointer, *escaped))


def _in_short(pointer: str) -> str:
    return pointer if len(pointer) <= 160 else f"{pointer[:78]}...{pointer[-78:]}"
