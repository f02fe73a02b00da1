"""Bounds of what a chat template may build: every text and list is counted before it is made.

The sandbox of Jinja keeps templates from Python's objects. It does not keep them from `join`,
`replace`, `'%0999999999d'` or a text that is doubled thirty times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, Undefined
from jinja2.utils import _PassArg, pass_context
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 24
"""The most characters of one text."""
MAX_BUILT = 1 << 26
"""The most characters that one rendering makes, counting copies."""
# Of one rendering: a loop turn is one step (0.1 µs and up), a call several. A chat of 1,000
# messages takes some 50,000; the bound is reached within about a second.
MAX_STEPS = 1_000_000
STEPS_OF_A_CALL = 4
STEPS_OF_AN_ELEMENT = 2
"""Steps for each element of a list or mapping that is counted."""

CONCATENATION = "concatenation"
"""The filter that stands for `~`."""
SLICING = "slicing"
"""The filter that stands for `[start:stop:step]`."""
DROPPED_FILTERS = ("urlize", "wordwrap", "xmlattr")
"""Filters of Jinja that are left out: they are for web pages, and slow or hard to bound."""

_ESCAPED = 6
"""The most characters that one becomes when it is escaped; most of the time it stays one."""
_PLAIN_FILTERS = (
    *("batch", "capitalize", "dictsort", "groupby", "lower", "pprint", "reverse", "slice", "sort"),
    *("string", "striptags", "sum", "title", "trim", "truncate", "unique", "upper", "items"),
)
_ESCAPING_FILTERS = ("e", "escape", "forceescape", "urlencode")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0 +-]*(\*|\d+)?(?:\.(\*|\d+)?)?")
_NUMBER = re.compile(r"\d+")
_NESTED_SPEC = re.compile(r":[^{}]*\{")


class Budget:
    """Budget of one rendering. Its methods raise SecurityError."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._built_left = MAX_BUILT
        self._steps_left = MAX_STEPS

    def step(self, num: int) -> None:
        self._steps_left -= num
        if self._steps_left < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps")

    def build(self, length: int) -> None:
        """Make a text or a list of at most `length` elements."""
        if length > self._max_characters:
            raise SecurityError(f"a text or list of {length} elements")
        self._built_left -= length
        if self._built_left < 0:
            raise SecurityError(f"more than {MAX_BUILT} characters built")
        # time for copies: a long text costs steps as a loop does
        if length > 1024:
            self.step(length >> 10)

    def length_of(self, value: Any, indent: int = 0) -> int:
        """Number of characters of `value` as text, roughly and from above, with `indent` blanks per
        level. What it holds twice counts twice.
        """
        if type(value) is str:
            return len(value)
        length, level, items = 0, 1, [value]
        # the bound ends it: lists that hold one list twice, level after level, have more elements
        # than could be walked through
        while items and length <= self._max_characters:
            inner: list[Any] = []
            for item in items:
                if isinstance(item, str | bytes):
                    length += len(item) + 2
                elif isinstance(item, int):
                    length += item.bit_length() // 3 + 6
                elif isinstance(item, Mapping | list | tuple | set | frozenset):
                    length += 4 + len(item) * (4 + level * indent)
                    self.step(STEPS_OF_AN_ELEMENT * len(item))
                    inner += item
                    inner += item.values() if isinstance(item, Mapping) else ()
                else:
                    length += 32
            items, level = inner, level + 1
        return length


def bounded_operation(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Count what `+`, `*` or `%` makes of two values."""
    if operator == "+":
        budget.build(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        budget.build(_percent_length(budget, left, right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int):
                budget.build(_size(sequence) * max(times, 0))


def _size(value: Any) -> int:
    """The elements of a text, or the bytes of a list's."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple) else 0


def bounded_call(budget: Budget, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Count what a method of a text or number makes."""
    # Jinja's sandbox wraps `format` and `format_map` in functions of its own
    method = getattr(function, "__wrapped__", function)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, str):
        given = [*args, *kwargs.values()]
        measure = _METHODS.get(name)
        budget.build(len(owner) if measure is None else measure(budget, owner, *given))
    elif isinstance(owner, bytes) or name == "to_bytes":
        raise SecurityError("bytes are not for templates")


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters that make texts or lists, each with a count before."""
    made = {name: _counted(name, 1) for name in _PLAIN_FILTERS}
    made |= {name: _counted(name, _ESCAPED) for name in _ESCAPING_FILTERS}
    made |= {name: _measured(name, measure) for name, measure in _MEASURES.items()}
    made |= {"join": _join, "list": _list}
    made |= {CONCATENATION: _concatenation, SLICING: _slicing}
    return made


class OperationsAsFilters(NodeTransformer):
    """Replaces `a ~ b` and `a[b:c]`, which no environment can intercept, by filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The filter on a list of the operands."""
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(operands, CONCATENATION, [], [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """The filter on the value, with the three parts of the slice."""
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        bounds = [one or nodes.Const(None) for one in (part.start, part.stop, part.step)]
        return nodes.Filter(node.node, SLICING, bounds, [], None, None, lineno=node.lineno)


def text_of(budget: Budget, value: Any) -> str:
    """`str(value)`, counted before."""
    if type(value) is str:
        return value
    if isinstance(value, str | Undefined):
        return str(value)
    budget.build(budget.length_of(value))
    return str(value)


def _call(name: str, context: Context, value: Any, args: Any, kwargs: Any) -> Any:
    """Jinja's own filter."""
    function = FILTERS[name]
    first: list[Any] = []
    match _PassArg.from_obj(function):
        case _PassArg.context:
            first = [context]
        case _PassArg.eval_context:
            first = [context.eval_ctx]
        case _PassArg.environment:
            first = [context.environment]
    return function(*first, value, *args, **kwargs)


def _counted(name: str, factor: int) -> Callable[..., Any]:
    @pass_context
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        given = [budget.length_of(item) for item in (value, *args, *kwargs.values())]
        # widths and lengths, which `batch` and `slice` fill up to
        sizes = [item for item in (*args, *kwargs.values()) if type(item) is int]
        budget.build(factor * sum(given) + max(sizes, default=0))
        return _call(name, context, value, args, kwargs)

    return filtered


def _measured(name: str, measure: Callable[..., int]) -> Callable[..., Any]:
    @pass_context
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.build(measure(budget, value, *args, **kwargs))
        return _call(name, context, value, args, kwargs)

    return filtered


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """`join` of texts that are counted one by one."""
    budget = _budget(context)
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    delimiter, texts, length = text_of(budget, d), [], 0
    for item in value:
        text = text_of(budget, item)
        length += len(text) + len(delimiter)
        if length > MAX_CHARACTERS:
            break
        budget.step(1)
        texts.append(text)
    budget.build(length)
    return delimiter.join(texts)


@pass_context
def _list(context: Context, value: Iterable[Any]) -> list[Any]:
    """`list` of elements that are counted one by one."""
    budget, listed = _budget(context), []
    if isinstance(value, str | list | tuple | Mapping):
        budget.build(8 * len(value))
        return list(value)
    for item in value:
        budget.build(8)
        listed.append(item)
    return listed


@pass_context
def _concatenation(context: Context, values: list[Any]) -> str:
    budget = _budget(context)
    texts = [text_of(budget, value) for value in values]
    budget.build(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _slicing(context: Context, value: Any, *bounds: Any) -> Any:
    _budget(context).build(_size(value))
    return value[slice(*bounds)]


def _budget(context: Context) -> Budget:
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]
    return budget


def _percent_length(budget: Budget, text: str, given: Any) -> int:
    values = given if isinstance(given, tuple) else (given,)
    longest = max((budget.length_of(value) for value in values), default=0)
    length = len(text)
    for found in _PERCENT.finditer(text):
        length += longest
        for width in found.groups(""):
            if width == "*":
                length += max((abs(v) for v in values if isinstance(v, int)), default=0)
            elif width:
                length += _as_int(width)
    return length


def _format_length(budget: Budget, text: str, *given: Any) -> int:
    longest = max((budget.length_of(value) for value in given), default=0)
    widest = max((_as_int(number) for number in _NUMBER.findall(text)), default=0)
    if _NESTED_SPEC.search(text):
        values = [v for one in given for v in (one.values() if isinstance(one, dict) else [one])]
        widest += max((abs(v) for v in values if isinstance(v, int)), default=0)
    return len(text) + text.count("{") * (longest + widest)


def _as_int(digits: str) -> int:
    # more than every bound, and `int` refuses very long ones
    return int(digits) if len(digits) < 12 else 10**12


def _replaced_length(budget: Budget, text: Any, old: Any = "", new: Any = "", *rest: Any) -> int:
    text, old, new = (text_of(budget, value) for value in (text, old, new))
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _padded_length(budget: Budget, text: Any, width: Any = 80, *rest: Any) -> int:
    return max(budget.length_of(text), int(width) if isinstance(width, int) else 0)


def _indented_length(
    budget: Budget, text: Any, width: Any = 4, first: Any = False, blank: Any = False
) -> int:
    text = text_of(budget, text)
    wide: int = width if isinstance(width, int) else budget.length_of(width)
    return len(text) + (int(text.count("\n")) + 1) * wide


def json_length(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """The length of the JSON of `value`, with the indent among the arguments of `tojson`."""
    indents = [x for x in (*args, *kwargs.values()) if type(x) is int]
    return budget.length_of(value, max(indents, default=0))


def _joined_length(budget: Budget, text: str, values: Any = ()) -> int:
    if not isinstance(values, list | tuple | dict | str):
        raise SecurityError("a join of what is not a list")
    return budget.length_of(values) + len(values) * len(text)


def _split_length(budget: Budget, text: str, separator: Any = None, *rest: Any) -> int:
    if isinstance(separator, str) and separator:
        return len(text) + 64 * text.count(separator)
    return len(text) + 64 * sum(map(text.count, " \n\t\r"))


def _expanded_length(budget: Budget, text: str, width: Any = 8) -> int:
    return len(text) + text.count("\t") * (width if isinstance(width, int) else 0)


def _translated_length(budget: Budget, text: str, table: Any = None) -> int:
    return len(text) * (1 + budget.length_of(table))


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_length),
    **dict.fromkeys(("format", "format_map"), _format_length),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split_length),
    "expandtabs": _expanded_length,
    "join": _joined_length,
    "replace": _replaced_length,
    "translate": _translated_length,
}
_MEASURES: dict[str, Callable[..., int]] = {
    "center": _padded_length,
    "format": lambda budget, text, *args, **kwargs: _percent_length(
        budget, text_of(budget, text), args or kwargs
    ),
    "indent": _indented_length,
    "replace": _replaced_length,
}
