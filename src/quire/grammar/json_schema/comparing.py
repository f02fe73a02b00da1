"""Compares what two nodes allow: for `oneOf`, whose alternatives must not overlap."""

from __future__ import annotations

from collections.abc import Callable

from quire.grammar.json_schema.nodes import (
    Anything,
    Array,
    Bound,
    Number,
    Object,
    Part,
    SchemaNode,
    Text,
    Values,
    allows,
    nodes_of_name,
    parts_of,
)
from quire.grammar.json_schema.patterns import NotComparable

_MOST_LEVELS = 8


def are_disjoint(one: SchemaNode, other: SchemaNode) -> bool:
    """Whether no value is allowed by both, as far as it can be proved."""
    try:
        return _are_disjoint(one, other, _MOST_LEVELS)
    except NotComparable:
        return False


def without_shared(node: SchemaNode, other: SchemaNode) -> SchemaNode:
    """The node without those of its listed values that the other one allows too."""
    try:
        return SchemaNode(
            [
                Values(tuple(value for value in part.values if not allows(other, value)))
                if isinstance(part, Values)
                else part
                for part in parts_of(node)
            ]
        )
    except NotComparable:
        return node


def telling_property(one: SchemaNode, other: SchemaNode) -> str | None:
    """The property that tells the objects of both apart where it is there, as a discriminator
    without which two objects may be equal; None: there is none.
    """
    return _property_of_all(one, other, _telling)


def avoidable_property(one: SchemaNode, other: SchemaNode) -> str | None:
    """The property without which an object of the first node is none of the other, or None."""
    return _property_of_all(one, other, _avoidable)


def _property_of_all(
    one: SchemaNode, other: SchemaNode, find: Callable[[Object, Object], list[str]]
) -> str | None:
    """The first property that `find` has for all parts of both that may overlap."""
    names: list[str] | None = None
    try:
        for ours in parts_of(one):
            for theirs in parts_of(other):
                if not _parts_are_disjoint(ours, theirs, _MOST_LEVELS):
                    if not isinstance(ours, Object) or not isinstance(theirs, Object):
                        return None
                    found = find(ours, theirs)
                    names = found if names is None else [name for name in names if name in found]
    except NotComparable:
        return None
    return names[0] if names else None


def _telling(one: Object, other: Object) -> list[str]:
    return [
        name
        for name in one.properties
        if name in other.properties and _properties_are_disjoint(one, other, name, _MOST_LEVELS)
    ]


def _avoidable(one: Object, other: Object) -> list[str]:
    return [name for name in other.properties if name in other.required - one.required]


def _are_disjoint(one: SchemaNode, other: SchemaNode, levels: int) -> bool:
    # schemas may contain themselves, and "not proved" is always a right answer
    if levels == 0:
        return False
    theirs = parts_of(other)
    return all(
        _parts_are_disjoint(part, another, levels) for part in parts_of(one) for another in theirs
    )


def _parts_are_disjoint(one: Part, other: Part, levels: int) -> bool:
    match one, other:
        case (Anything(), _) | (_, Anything()):
            return False
        case Values(), Values():
            return one.keys.isdisjoint(other.keys)
        case (Values(), _) | (_, Values()):
            listed, rest = (one, other) if isinstance(one, Values) else (other, one)
            assert isinstance(listed, Values)
            node = SchemaNode([rest])
            return not any(allows(node, value) for value in listed.values)
        case Text(), Text():
            return _are_apart(one.shortest, one.longest, other.shortest, other.longest)
        case Number(), Number():
            return _is_below(one.high, other.low) or _is_below(other.high, one.low)
        case Array(), Array():
            return _arrays_are_disjoint(one, other, levels)
        case Object(), Object():
            if _are_apart(one.fewest, one.most, other.fewest, other.most):
                return True
            # a property that both objects may lack cannot tell them apart
            names = one.required | other.required
            return any(_properties_are_disjoint(one, other, name, levels) for name in names)
    return True


def _are_apart(low: int, high: int | None, other_low: int, other_high: int | None) -> bool:
    is_below = high is not None and high < other_low
    return is_below or (other_high is not None and other_high < low)


def _is_below(high: Bound | None, low: Bound | None) -> bool:
    if high is None or low is None:
        return False
    is_at_both = high.value == low.value and not (high.is_open or low.is_open)
    return high.value <= low.value and not is_at_both


def _arrays_are_disjoint(one: Array, other: Array, levels: int) -> bool:
    if _are_apart(one.fewest, one.most, other.fewest, other.most):
        return True
    # one more than the prefixes: all later items follow the same two nodes
    known = max(len(one.prefix), len(other.prefix)) + 1
    for index in range(min(max(one.fewest, other.fewest), known)):
        ours, theirs = (
            each.prefix[index] if index < len(each.prefix) else each.rest for each in (one, other)
        )
        if _are_disjoint(ours, theirs, levels - 1):
            return True
    return False


def _properties_are_disjoint(one: Object, other: Object, name: str, levels: int) -> bool:
    theirs = nodes_of_name(other, name)
    return any(
        _are_disjoint(ours, another, levels - 1)
        for ours in nodes_of_name(one, name)
        for another in theirs
    )
