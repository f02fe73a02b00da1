"""A schema's values as nodes of a graph, with every reference and combination unfolded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any

from quire.grammar.json_schema.patterns import NotComparable, found_in
from quire.grammar.json_schema.places import UnsupportedSchema


@dataclass(frozen=True, slots=True)
class Anything:
    """Every value."""


@dataclass(frozen=True)
class Values:
    """Exactly these values."""

    values: tuple[Any, ...]

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys of the values: see `key_of`."""
        return frozenset(map(key_of, self.values))


@dataclass(frozen=True, slots=True)
class Text:
    """Strings by number of characters, formats and patterns in them, but for the `excluded`."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """The end of a range; `is_open`: it does not belong to it."""

    value: Decimal
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    """The numbers of a range, or only its integers, that are multiples of `multiple`."""

    is_integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple: Fraction | None = None


@dataclass(slots=True)
class Array:
    """The lists whose items follow `prefix`, then `rest`."""

    prefix: list[SchemaNode]
    rest: SchemaNode
    fewest: int = 0
    most: int | None = None


@dataclass(slots=True)
class Object:
    """The objects with these properties; those whose name has a pattern of `patterns` in it follow
    its node, and all others `rest`.
    """

    properties: dict[str, SchemaNode]
    rest: SchemaNode
    required: frozenset[str] = frozenset()
    patterns: dict[str, SchemaNode] = field(default_factory=dict)
    fewest: int = 0
    most: int | None = None


Part = Anything | Values | Text | Number | Array | Object


class SchemaNode:
    """Everything that one of its options allows. They are made when they are first asked for."""

    __slots__ = ("_is_in_making", "_make", "_options", "failure", "is_loose")

    def __init__(
        self,
        options: Sequence[Option] = (),
        *,
        is_loose: bool = False,
        failure: UnsupportedSchema | None = None,
        make: Callable[[], Sequence[Option]] | None = None,
    ) -> None:
        """`is_loose`: it may allow what its schema excludes. `failure`: why it cannot be made."""
        self._options = list(options)
        self._make = make
        self._is_in_making = False
        self.is_loose = is_loose
        self.failure = failure

    @property
    def options(self) -> list[Option]:
        """The parts and nodes one of which a value has to follow, as `make` has left them."""
        self.make()
        return self._options

    def make(self) -> None:
        """Make the options, unless that is done. Raises NotComparable while they are made, which a
        value inside them may depend on.
        """
        if self._make is not None:
            if self._is_in_making:
                raise NotComparable("it depends on itself")
            self._is_in_making = True
            try:
                self._options = list(self._make())
            except UnsupportedSchema as error:
                self.failure = error
            finally:
                self._is_in_making = False
            self._make = None

    def keep(self, options: Sequence[Option]) -> None:
        self._options, self.failure = list(options), None


Option = Part | SchemaNode


def parts_of(node: SchemaNode, *, exactly: bool = False) -> list[Part]:
    """The parts that a node consists of, through its options. Raises NotComparable, with `exactly`
    also for parts that allow too much.
    """
    found: list[Part] = []
    waiting, seen = [node], {id(node)}
    while waiting:
        each = waiting.pop()
        if exactly and each.is_loose:
            raise NotComparable("values in a oneOf whose alternatives overlap cannot be compared")
        options = each.options
        if each.failure is not None:
            raise NotComparable(str(each.failure))
        for option in options:
            if not isinstance(option, SchemaNode):
                found.append(option)
            elif id(option) not in seen:
                seen.add(id(option))
                waiting.append(option)
    return found


def is_anything(node: SchemaNode) -> bool:
    """Whether a node allows every value. Raises NotComparable."""
    return any(isinstance(part, Anything) for part in parts_of(node))


def children_of(option: Option) -> Iterable[SchemaNode]:
    """The nodes that an option of a node leads to."""
    match option:
        case SchemaNode():
            return [option]
        case Array(prefix, rest):
            return [*prefix, rest]
        case Object(properties, rest, _, patterns):
            return [*properties.values(), *patterns.values(), rest]
    return []


def key_of(value: Any) -> str:
    """A text that is equal for equal values, as JSON has it: 1 is 1.0 and True is not 1."""
    # members of objects have no order (RFC 8259, 4)
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def allows(node: SchemaNode, value: Any) -> bool:
    """Whether a value is among those of a node. Formats are not looked at. Raises NotComparable."""
    return any(_part_allows(part, value) for part in parts_of(node, exactly=True))


def _part_allows(part: Part, value: Any) -> bool:
    match part:
        case Anything():
            return True
        case Values():
            return key_of(value) in part.keys
        case Text():
            return isinstance(value, str) and _is_text(part, value)
        case Number():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and is_in_range(part, as_decimal(value))
        case Array():
            return isinstance(value, list) and _is_array(part, value)
        case Object():
            return isinstance(value, dict) and _is_object(part, value)


def _is_text(part: Text, value: str) -> bool:
    if len(value) < part.shortest or value in part.excluded:
        return False
    if part.longest is not None and len(value) > part.longest:
        return False
    return all(found_in(pattern, value) for pattern in part.patterns)


def as_decimal(value: float) -> Decimal:
    """A number of JSON as it is written."""
    # Decimal(0.1) would have the digits of the float that is nearest
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def is_in_range(part: Number, value: Decimal) -> bool:
    """Whether a number belongs to a part."""
    low, high = part.low, part.high
    if part.is_integer and value != value.to_integral_value():
        return False
    if low is not None and (value < low.value or (low.is_open and value == low.value)):
        return False
    if high is not None and (value > high.value or (high.is_open and value == high.value)):
        return False
    return part.multiple is None or (Fraction(value) / part.multiple).denominator == 1


def _is_array(part: Array, value: list[Any]) -> bool:
    if len(value) < part.fewest or (part.most is not None and len(value) > part.most):
        return False
    nodes = [*part.prefix, *[part.rest] * (len(value) - len(part.prefix))]
    return all(allows(node, item) for node, item in zip(nodes, value, strict=False))


def _is_object(part: Object, value: dict[str, Any]) -> bool:
    if not part.required <= value.keys() or len(value) < part.fewest:
        return False
    if part.most is not None and len(value) > part.most:
        return False
    return all(
        allows(node, item) for name, item in value.items() for node in nodes_of_name(part, name)
    )


def nodes_of_name(part: Object, name: str) -> list[SchemaNode]:
    """The nodes that the value of a property has to follow. Raises NotComparable."""
    if name in part.properties:
        return [part.properties[name]]
    return [node for p, node in part.patterns.items() if found_in(p, name)] or [part.rest]
