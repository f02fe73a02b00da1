"""Finds out from a template's syntax tree whether it walks through the parts of contents ("openai")
or takes contents as texts alone ("string").

The tree is read as a small data flow: which names hold the messages, one message, or a message's
content. A `for` over a content means that the template walks through parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from jinja2 import nodes

from quire.text.templates.template_forms import ContentFormat

# A name as one scope knows it: (macro's name or "" outside of macros, name).
_Name = tuple[str, str]
# What a name can hold.
_MESSAGES, _MESSAGE, _CONTENT = "messages", "message", "content"


@dataclass(slots=True)
class _Facts:
    """All that moves values between names in a tree, each with its macro ("" for none)."""

    parameters: dict[str, list[str]] = field(default_factory=dict)
    copies: list[tuple[_Name, nodes.Node, str]] = field(default_factory=list)
    loops: list[tuple[nodes.For, str]] = field(default_factory=list)
    calls: list[tuple[nodes.Call, str]] = field(default_factory=list)


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """The format of the template as a whole: "openai" if a loop runs over a message's content, or
    outside macros over a variable called content, else "string".
    """
    facts = _Facts()
    _collect(tree, "", facts)
    _bind_arguments(facts)
    held = _what_names_hold(facts)
    for loop, scope in facts.loops:
        expression = _source(loop.iter)
        if _holds(expression, scope, facts, held) == _CONTENT:
            return "openai"
        if scope == "" and isinstance(expression, nodes.Name) and expression.name == "content":
            return "openai"
    return "string"


def _collect(node: nodes.Node, scope: str, facts: _Facts) -> None:
    if isinstance(node, nodes.Macro):
        scope = node.name
        facts.parameters[scope] = [parameter.name for parameter in node.args]
    elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
        name = _scoped(node.target.name, scope, facts)
        facts.copies.append((name, node.node, scope))
    elif isinstance(node, nodes.For):
        facts.loops.append((node, scope))
    elif isinstance(node, nodes.Call):
        facts.calls.append((node, scope))
    for child in node.iter_child_nodes():
        _collect(child, scope, facts)


def _bind_arguments(facts: _Facts) -> None:
    for call, scope in facts.calls:
        if isinstance(call.node, nodes.Name) and call.node.name in facts.parameters:
            macro = call.node.name
            for parameter, argument in _arguments(call, facts.parameters[macro]):
                facts.copies.append(((macro, parameter), argument, scope))


def _arguments(call: nodes.Call, parameters: list[str]) -> Iterator[tuple[str, nodes.Expr]]:
    yield from zip(parameters, call.args, strict=False)
    yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _what_names_hold(facts: _Facts) -> dict[_Name, str]:
    """Follow copies and loops until nothing new is learnt."""
    held: dict[_Name, str] = {("", "messages"): _MESSAGES}
    known = 0
    while known != len(held):
        known = len(held)
        for loop, scope in facts.loops:
            if isinstance(loop.target, nodes.Name) and (
                _holds(_source(loop.iter), scope, facts, held) == _MESSAGES
            ):
                held.setdefault(_scoped(loop.target.name, scope, facts), _MESSAGE)
        for name, expression, scope in facts.copies:
            value = _holds(_source(expression), scope, facts, held)
            if value is not None:
                held.setdefault(name, value)
    return held


def _source(expression: nodes.Node | None) -> nodes.Node | None:
    """The expression beneath filters and slices."""
    while isinstance(expression, nodes.Filter) or _is_slice(expression):
        expression = expression.node  # type: ignore[union-attr]
    return expression


def _is_slice(expression: nodes.Node | None) -> bool:
    return isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Slice)


def _holds(
    expression: nodes.Node | None, scope: str, facts: _Facts, held: dict[_Name, str]
) -> str | None:
    if isinstance(expression, nodes.Name):
        return held.get(_scoped(expression.name, scope, facts))
    key = _constant_key(expression)
    if key == "content" and isinstance(expression, nodes.Getattr | nodes.Getitem):
        owner = _holds(_source(expression.node), scope, facts, held)
        return _CONTENT if owner == _MESSAGE else None
    return None


def _constant_key(expression: nodes.Node | None) -> str | None:
    if isinstance(expression, nodes.Getattr):
        return expression.attr
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const):
        return str(expression.arg.value)
    return None


def _scoped(name: str, scope: str, facts: _Facts) -> _Name:
    return (scope, name) if name in facts.parameters.get(scope, ()) else ("", name)
