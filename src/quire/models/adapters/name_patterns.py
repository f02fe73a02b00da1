"""Values of modules by patterns of names: PEFT's `rank_pattern`, `alpha_pattern`. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quire.errors import BadAdapter
from quire.models.formats.expressions import Expressions, TooManyWays

_NAME = re.compile(r"\^?(?:\\[.\-]|[\w.-])+")
"""A pattern that is a name, with or without escapes."""
_MOST_OTHERS = 64
_LONGEST = 256
_MOST_REPEATS = 2
"""Unbounded ones: matching takes time by the length of a name to this power."""
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_NOT_ALLOWED = re.compile(r"\)[*+?{]|\(\?|\\[1-9bB]")
"""A group that repeats, which may take time without limit; what looks around or back."""


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Patterns, each with a number: the first that matches a whole name, or its end behind a dot,
    counts.

    `names` are those that are plain names, with their places among all; `others` in order.
    """

    names: Mapping[str, tuple[int, float]]
    others: tuple[tuple[int, re.Pattern[str], float], ...]

    def value_of(self, module: str, default: float) -> float:
        """The number of a module."""
        found = [self.names[end] for end in _ends(module) if end in self.names]
        found += [(place, value) for place, p, value in self.others if p.match(module)]
        return min(found)[1] if found else default


def name_patterns(key: str, values: Mapping[str, float]) -> NamePatterns:
    """Read the patterns of `key`. Raises BadAdapter for a bad expression, or a slow one."""
    names: dict[str, tuple[int, float]] = {}
    others: list[tuple[int, re.Pattern[str], float]] = []
    expressions = Expressions()
    for place, (text, value) in enumerate(values.items()):
        if _NAME.fullmatch(text):
            names.setdefault(text.replace("\\", ""), (place, value))
        else:
            others.append((place, _compiled(key, text, expressions), value))
    if len(others) > _MOST_OTHERS:
        raise BadAdapter(
            f"adapter_config.json: {key} has {len(others)} regular expressions, and it may have "
            f"{_MOST_OTHERS} besides plain names."
        )
    return NamePatterns(names, tuple(others))


def _compiled(key: str, text: str, expressions: Expressions) -> re.Pattern[str]:
    where = f"adapter_config.json: {key} has {text[:80]!r}"
    repeats = len(_REPEATS.findall(text))
    slow = (
        f"{where}, which may take long to match: a pattern has at most {_LONGEST} characters and "
        f"{_MOST_REPEATS} repetitions, none of a group, and few alternatives."
    )
    if len(text) > _LONGEST or repeats > _MOST_REPEATS or _NOT_ALLOWED.search(text):
        raise BadAdapter(slow)
    try:
        return expressions.one(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise BadAdapter(f"{where}, which is not a regular expression: {error}.") from error
    except TooManyWays as error:
        raise BadAdapter(slow) from error


def _ends(module: str) -> Iterator[str]:
    """The name with its beginning marked, and all of its ends behind a dot, the name first."""
    yield "^" + module
    yield module
    rest = module
    while "." in rest:
        rest = rest.partition(".")[2]
        yield rest
