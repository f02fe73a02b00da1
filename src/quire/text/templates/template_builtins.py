"""The environment of chat templates: Hugging Face's names, filter and tag, made harmless."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training: its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own, as the call block is that transformers makes of it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class DictMaker:
    """`dict` of a template: makes dictionaries and gives no access to the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class PlainNamespace(Namespace):
    """`namespace` of a template, without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        # `self` is not named, so that a template may write namespace(self=...).
        space, *rest = args
        values = dict(*rest, **attributes)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(space, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def count_loop_turns(tree: nodes.Template) -> None:
    """Let each loop turn and macro of `tree` read `turn` of its environment; changes `tree`."""
    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        bodies.extend(tree.find_all(kind))
    for node in bodies:
        turn = nodes.EnvironmentAttribute("turn", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))


def raise_exception(message: str) -> None:
    """`raise_exception` of a template: the request is refused with the message."""
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(format: str) -> str:
    """`strftime_now` of a template: the local time."""
    return datetime.now().strftime(format)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, with the options of json.dumps that templates use."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
