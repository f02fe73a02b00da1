"""Takes out of a graph what no value can ever follow, so that no text comes to a dead end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from quire.grammar.json_schema.nodes import (
    Array,
    Object,
    Option,
    SchemaNode,
    Values,
    children_of,
    is_anything,
)
from quire.grammar.json_schema.patterns import PatternRules, found_in
from quire.grammar.json_schema.places import UnsupportedSchema

Alternatives = Mapping[tuple[SchemaNode, SchemaNode], str]
"""Pointers to alternatives, by the node that has them and their own."""


def prune(root: SchemaNode, rules: PatternRules) -> None:
    """Leave in each node the options that some finite value follows, in place; and in objects the
    patterns of names that are not all declared, and say something.
    """
    nodes = all_nodes(root)
    for part in _objects(nodes):
        for pattern, node in list(part.patterns.items()):
            names = [name for name in part.properties if found_in(pattern, name)]
            is_moot = is_anything(node) and is_anything(part.rest)
            if is_moot or not rules.has_other_names(pattern, names):
                del part.patterns[pattern]
    # from nothing upwards, since a node that only refers to itself allows no finite value
    alive: set[int] = set()
    is_new = True
    while is_new:
        is_new = False
        for node in reversed(nodes):
            if id(node) not in alive and any(_lives(o, alive) for o in node.options):
                alive.add(id(node))
                is_new = True
    for node in nodes:
        node.keep([option for option in node.options if _lives(option, alive)])
    for node in nodes:
        for option in node.options:
            if isinstance(option, Array):
                _cut(option)


def leave_out_failed(root: SchemaNode, alternatives: Alternatives) -> list[str]:
    """Leave out the alternatives that cannot be enforced where there are others. Returns pointers
    to them.

    Raises UnsupportedSchema where nothing else is left.
    """
    nodes = all_nodes(root)
    failed = {id(node): node.failure for node in nodes if node.failure is not None}
    is_new = bool(failed)
    while is_new:
        is_new = False
        for node in reversed(nodes):
            if id(node) not in failed:
                failure = _failure(node, alternatives, failed)
                if failure is not None:
                    failed[id(node)] = failure
                    is_new = True
    if id(root) in failed:
        raise failed[id(root)]
    left_out: list[str] = []
    for node in all_nodes(root, failed):
        gone = [o for o in node.options if isinstance(o, SchemaNode) and id(o) in failed]
        pointers = [alternatives[node, option] for option in gone]
        # Several alternatives together cannot be enforced where one of them cannot.
        left_out += [p for p in pointers if not any(each.startswith(f"{p}/") for each in pointers)]
        node.keep([option for option in node.options if id(option) not in failed])
    return left_out


def _failure(
    node: SchemaNode, alternatives: Alternatives, failed: Mapping[int, UnsupportedSchema]
) -> UnsupportedSchema | None:
    """The reason that a node cannot be enforced: a part's, or its first alternative's."""
    choices = [o for o in node.options if isinstance(o, SchemaNode) and (node, o) in alternatives]
    for option in node.options:
        if option in choices:
            continue
        for child in children_of(option):
            if id(child) in failed:
                return failed[id(child)]
    if choices and all(id(option) in failed for option in choices):
        return failed[id(choices[0])]
    return None


def _objects(nodes: Sequence[SchemaNode]) -> Iterator[Object]:
    for node in nodes:
        yield from (option for option in node.options if isinstance(option, Object))


def all_nodes(root: SchemaNode, beyond: Collection[int] = ()) -> list[SchemaNode]:
    """The node and all that it leads to, but not through those with these ids."""
    found, seen = [root], {id(root), *beyond}
    for node in found:
        for option in node.options:
            for child in children_of(option):
                if id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def _lives(option: Option, alive: set[int]) -> bool:
    match option:
        case SchemaNode():
            return id(option) in alive
        case Values(values):
            return bool(values)
        case Array(prefix, rest, fewest):
            first = prefix[:fewest]
            needs_rest = fewest > len(prefix)
            return all(id(n) in alive for n in first) and (not needs_rest or id(rest) in alive)
        case Object(properties, rest, required, patterns, fewest, most):
            if most is not None and len(required) > most:
                return False
            if not all(id(properties[name]) in alive for name in required):
                return False
            has_others = id(rest) in alive or any(id(n) in alive for n in patterns.values())
            return has_others or sum(id(n) in alive for n in properties.values()) >= fewest
    return True


def _cut(array: Array) -> None:
    """End a list where an item would have to follow what nothing follows."""
    if array.most is not None:
        del array.prefix[array.most :]
    for index, node in enumerate(array.prefix):
        if is_empty(node):
            array.most = index if array.most is None else min(array.most, index)
            del array.prefix[index:]
            return


def is_empty(node: SchemaNode) -> bool:
    """Whether a pruned node allows nothing."""
    return not node.options
