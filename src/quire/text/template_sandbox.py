"""The Jinja environment in which chat templates run: immutable, closed, with a budget."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Of one rendering: a loop turn is one step (0.1 µs and up), a call several. A chat of 1,000
# messages takes some 50,000; the bound is reached within about a second.
MAX_STEPS = 1_000_000
STEPS_OF_A_CALL = 4
MAX_POWER_BITS = 4096


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks assistant text for training: its body is
    rendered.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own, as the call block is that transformers makes of it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class DictMaker:
    """`dict` of a template: makes dictionaries and gives no access to the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        """The dictionary of the arguments, as `dict` makes it."""
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


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering (or one compilation); it holds that rendering's budget.

    Raises jinja2.exceptions.SecurityError inside the template when a bound is passed.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, max_characters: int = 0) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # milliseconds a call, for no template that we know of
        self.globals["dict"] = DictMaker()
        self.globals["namespace"] = PlainNamespace
        self._max_characters = max_characters
        self._steps_left = MAX_STEPS

    @property
    def turn(self) -> None:
        """Read by the code of every loop turn (see `count_loop_turns`), which counts it."""
        self._spend(1)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here, so that calls are counted too."""
        self._spend(STEPS_OF_A_CALL)
        if isinstance(getattr(function, "__self__", None), str):
            for argument in args:  # ljust, center, zfill and their like make texts of any length
                self._refuse_length(argument if isinstance(argument, int) else 0)
        return super().call(context, function, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """What the sandbox calls for a forbidden attribute; Jinja would go on until it is used."""
        raise jinja2.exceptions.SecurityError(
            f"the attribute {attribute!r} of a {type(obj).__name__} is not for templates"
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**`, whose results can be far larger than their operands."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_POWER_BITS:
                raise jinja2.exceptions.SecurityError("a power with too large a result")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self._refuse_length(len(sequence) * times)
        return super().call_binop(context, operator, left, right)

    def _refuse_length(self, length: int) -> None:
        if length > self._max_characters:
            raise jinja2.exceptions.SecurityError(f"a text or list of {length} elements")

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise jinja2.exceptions.SecurityError(f"more than {MAX_STEPS} steps")


def count_loop_turns(tree: nodes.Template) -> None:
    """Let each loop turn and macro of `tree` read `turn` of its environment; changes `tree`."""
    bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        bodies.extend(tree.find_all(kind))
    for node in bodies:
        turn = nodes.EnvironmentAttribute("turn", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
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
