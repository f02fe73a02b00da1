"""Regular expressions that a config brings, of which none may take long. Free of torch.

Python's search tries every way to match a name until one does. So the ways are counted in the tree
that its own parser makes of an expression, and a config has an allowance for all of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.models.config_reader import unsupported

# what re.compile reads expressions with; an operation that is not known here is refused
_parse = re._parser.parse  # type: ignore[attr-defined]

_MOST_PATTERN = 400
"""Characters of an expression."""
_MOST_PATTERNS = 1_000
MOST_WAYS = 1 << 18
"""Most ways that a config's expressions may take to match a name: milliseconds per module."""
_MANY, _FEW = 32, 8
"""Places at which a repeat may end: half of a long name, since several repeats share the name; and
where a letter has to follow, how often that is in it.
"""
_LONGEST_NAME = 1_000
_LAST = 127
"""The last character of ASCII, which names are in."""
_SINGLE = ("LITERAL", "NOT_LITERAL", "IN", "ANY", "CATEGORY", "RANGE")
_ATOMIC = ("ASSERT", "ASSERT_NOT", "ATOMIC_GROUP")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class TooManyWays(ValueError):
    """An expression may take long, or it is not known how long."""


class Expressions:
    """Compiles the expressions of one config, which share an allowance."""

    def __init__(self) -> None:
        self._num_left, self._ways_left = _MOST_PATTERNS, MOST_WAYS

    def compile(self, texts: Sequence[str], key: str) -> tuple[re.Pattern[str], ...]:
        """The expressions of `key`, to be matched from the beginning of a module's name. Raises
        UnsupportedConfigValue for texts that are not expressions, or would take too long.
        """
        self._num_left -= len(texts)
        if self._num_left < 0:
            allowed = f"at most {_MOST_PATTERNS} regular expressions in a config"
            raise unsupported(key, list(texts), allowed)
        return tuple(self._supported(text, key) for text in texts)

    def one(self, text: str) -> re.Pattern[str]:
        """Compile one. Raises TooManyWays where it would take too long, re.error, RecursionError or
        OverflowError for what is not an expression.
        """
        if len(text) > _MOST_PATTERN:
            raise TooManyWays("it is too long")
        self._ways_left -= count_ways(text)
        if self._ways_left < 0:
            raise TooManyWays("all of them together would take too long")
        return re.compile(text)

    def _supported(self, text: str, key: str) -> re.Pattern[str]:
        try:
            return self.one(text)
        except (ValueError, re.error, RecursionError, OverflowError):
            allowed = (
                f"regular expressions of at most {_MOST_PATTERN} characters with few repeats and "
                "alternatives, and without flags"
            )
            raise unsupported(key, text, allowed) from None


def count_ways(text: str) -> int:
    """Number of ways in which a search may try to match a name with a regular expression, roughly;
    the last repeat does not count, with nothing behind it that could fail. Raises TooManyWays where
    they are countless or there are flags, re.error for what is not an expression.
    """
    tree = _parse(text)
    if tree.state.flags & ~re.UNICODE:
        raise TooManyWays("it has flags")
    items = list(tree)
    has_end = bool(items) and str(items[-1][0]) == "AT"
    if len(items) > has_end and _is_last(*items[-1 - has_end], has_end=has_end):
        del items[-1 - has_end :]
    ways, aside = _of_sequence(items, is_led=False)
    return ways + aside


def _is_last(operation: object, value: Any, *, has_end: bool) -> bool:
    """Whether it is a repeat that takes all at once; before the name's end: of any character."""
    if str(operation) not in _REPEATS or not _is_single(value[2]):
        return False
    return not has_end or (str(value[2][0][0]) == "ANY" and value[1] >= _LONGEST_NAME)


def _of_sequence(items: Sequence[Any], *, is_led: bool) -> tuple[int, int]:
    """The ways a sequence matches, and those of looking ahead. is_led: a letter follows it."""
    ways, aside = 1, 0
    for i, (operation, value) in enumerate(items):
        is_next_led = _is_letter(*items[i + 1]) if i + 1 < len(items) else is_led
        own, more = _of_item(str(operation), value, is_led=is_next_led)
        aside += ways * more
        ways *= own
        if ways + aside > MOST_WAYS:
            raise TooManyWays("there are countless ways")
    return ways, aside


def _of_item(operation: str, value: Any, *, is_led: bool) -> tuple[int, int]:
    if operation == "IN" and any(str(kind) == "RANGE" and of[1] > _LAST for kind, of in value):
        raise TooManyWays("it has a range that takes long to compile")
    if operation in _SINGLE or operation in ("AT", "FAILURE", "GROUPREF"):
        return 1, 0
    if operation in _REPEATS:
        return _of_repeat(operation, *value, is_led=is_led)
    if operation == "BRANCH":
        found = [_of_sequence(part, is_led=is_led) for part in value[1]]
        return sum(ways for ways, _ in found), sum(aside for _, aside in found)
    if operation == "SUBPATTERN" and not value[1] and not value[2]:
        return _of_sequence(value[3], is_led=is_led)
    if operation in _ATOMIC:
        part = value if operation == "ATOMIC_GROUP" else value[1]
        return 1, sum(_of_sequence(part, is_led=False))
    raise TooManyWays(f"{operation} is not allowed")


def _of_repeat(
    operation: str, least: int, most: int, part: Any, *, is_led: bool
) -> tuple[int, int]:
    is_short = is_led or (_is_single(part) and str(part[0][0]) == "LITERAL")
    if part.getwidth()[0] == 0 and most > 1:
        raise TooManyWays("what may be empty is repeated")
    own, more = _of_sequence(part, is_led=False)
    most = min(most, _MANY)
    least = min(least, most)
    counts = range(least, most + 1)
    if own == 1:
        ways = len(counts) if not is_short else min(len(counts), _FEW)
    else:
        ways = sum(own**count for count in counts)
    aside = more * sum(own**count for count in range(most))
    return (1, ways + aside) if operation == "POSSESSIVE_REPEAT" else (ways, aside)


def _is_letter(operation: object, value: Any) -> bool:
    """Whether it begins with a letter, or one of several."""
    if str(operation) == "SUBPATTERN":
        return bool(value[3]) and _is_letter(*value[3][0])
    if str(operation) == "BRANCH":
        return all(bool(part) and _is_letter(*part[0]) for part in value[1])
    return str(operation) == "LITERAL"


def _is_single(part: Any) -> bool:
    """Whether it matches one character."""
    return len(part) == 1 and str(part[0][0]) in _SINGLE
