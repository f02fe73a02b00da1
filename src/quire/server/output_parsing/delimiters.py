"""Finding delimiters in text that arrives in pieces, holding back only what may begin one."""

from __future__ import annotations

import re
from collections.abc import Collection

BLANKS = " \t\r\n"
NON_BLANK = re.compile(r"[^ \t\r\n]")
"""Blanks are JSON's: other white space is text that a model wrote on purpose."""


def check_delimiters(delimiters: Collection[str]) -> None:
    """Raise ValueError for one that is empty or lies within another."""
    for delimiter in delimiters:
        others = [other for other in delimiters if other != delimiter and delimiter in other]
        if not delimiter or others:
            raise ValueError(f"The delimiter {delimiter!r} is empty or lies within {others}.")


class Delimiters:
    """The delimiters that one state looks for.

    No delimiter may contain another, so the leftmost match is the only one and never depends on
    text that has not come yet. Raises ValueError otherwise.
    """

    __slots__ = ("_any", "_beginnings", "_first", "_longest", "first_chars")

    def __init__(self, delimiters: Collection[str]) -> None:
        check_delimiters(delimiters)
        self.first_chars = "".join(sorted({delimiter[0] for delimiter in delimiters}))
        self._any = re.compile("|".join(re.escape(delimiter) for delimiter in delimiters))
        self._first = re.compile(f"[{re.escape(self.first_chars)}]") if delimiters else None
        self._beginnings = {
            delimiter[:size] for delimiter in delimiters for size in range(1, len(delimiter))
        }
        self._longest = max(map(len, delimiters), default=0)

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """The leftmost delimiter from `start` and where it begins.

        Without one: None, and where the text ends that can be no part of a delimiter any more.
        """
        # a piece without any first character is done with here, at the cost of one search
        if self._first is None or self._first.search(text, start) is None:
            return len(text), None
        found = self._any.search(text, start)
        if found is not None:
            return found.start(), found.group()
        return self._beginning(text, max(start, len(text) - self._longest + 1)), None

    def at(self, text: str, position: int) -> str | None:
        """The delimiter at this position; "" if it may be the beginning of one, None if not."""
        found = self._any.match(text, position) if self._first is not None else None
        if found is not None:
            return found.group()
        rest = text[position : position + self._longest]
        return "" if rest in self._beginnings and position + len(rest) == len(text) else None

    def _beginning(self, text: str, start: int) -> int:
        """Index from which the text may be a delimiter; its length if there is none."""
        while (found := self._first.search(text, start)) is not None:  # type: ignore[union-attr]
            start = found.start()
            if text[start:] in self._beginnings:
                return start
            start += 1
        return len(text)
