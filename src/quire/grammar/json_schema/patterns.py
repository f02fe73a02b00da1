"""The patterns of JSON schemas: regular expressions that occur somewhere in a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol

from quire.errors import EngineError
from quire.grammar.regular import escaped

_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\\\]])*\]|\(\?<(?=[A-Za-z_])|\$|.", re.DOTALL)
_SET_OPERATOR = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)
_LONGEST_NAME = 256


class PatternRules(Protocol):
    """Questions about patterns that the library answers."""

    def error_of(self, pattern: str) -> str | None:
        """Return the reason that a pattern cannot be enforced; None: it can."""

    def has_other_names(self, pattern: str, names: Sequence[str]) -> bool:
        """Whether a pattern of property names has others than these."""


class NotComparable(EngineError):
    """A value cannot be compared with a schema; the text says why."""


def for_library(pattern: str) -> str:
    """The pattern with its character sets as ECMAScript reads them: other engines have operators
    for sets, and sets within sets.
    """
    return "".join(map(_plain_set, _PART.findall(pattern)))


def _plain_set(part: str) -> str:
    if len(part) < 2 or part[0] != "[":
        return part
    start = 2 if part.startswith("[^") else 1
    return part[:start] + _SET_OPERATOR.sub(_escaped, part[start:])


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    return text if text[0] == "\\" else "".join("\\" + char for char in text)


def found_in(pattern: str, text: str) -> bool:
    """Whether the pattern occurs in a text. Raises NotComparable where that is not known."""
    return _compiled(pattern).search(text) is not None


@lru_cache(512)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = _PART.findall(pattern)
    # Python's `$` also matches before a line end that ends the text, ECMAScript's does not
    ours = {"$": r"\Z", "(?<": "(?P<", r"\z": r"\Z", r"\/": "/"}
    try:
        return re.compile("".join(ours.get(part, part) for part in parts), re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise NotComparable(
            f"the pattern {pattern[:80]!r} cannot be compared with values ({error})"
        ) from None


def all_but(texts: Collection[str]) -> str | None:
    """A pattern of every text but these, for any engine; None if one of them is too long."""
    if any(len(text) > _LONGEST_NAME for text in texts):
        return None
    return f"^{_all_but(sorted(set(texts)), 0)}$"


def _all_but(texts: list[str], depth: int) -> str:
    """A pattern for the rest after the first `depth` characters, which these texts share."""
    by_char: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > depth:
            by_char.setdefault(text[depth], []).append(text)
    is_taken = any(len(text) == depth for text in texts)
    others = "".join(map(_in_set, by_char))
    options = [f"[^{others}](?s:.*)" if others else "(?s:.+)"]
    options += [escaped(char) + _all_but(rest, depth + 1) for char, rest in by_char.items()]
    if not is_taken:
        options.append("")
    return f"(?:{'|'.join(options)})"


def _in_set(char: str) -> str:
    return "\\" + char if char in r"\]^-[&~" else char
