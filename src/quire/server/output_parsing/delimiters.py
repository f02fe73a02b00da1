"""Finding marks in text that arrives in pieces, holding back only what may begin one."""

from __future__ import annotations

import re
from collections.abc import Collection

BLANKS = " \t\r\n"
NON_BLANK = re.compile(r"[^ \t\r\n]")
"""Blanks are JSON's: other white space is text that a model wrote on purpose."""


class Marks:
    """The marks that one state looks for.

    No mark may contain another, so the leftmost match is the only one and never depends on text
    that has not come yet. Raises ValueError otherwise.
    """

    __slots__ = ("_any", "_beginnings", "_first", "_longest", "first_chars")

    def __init__(self, marks: Collection[str]) -> None:
        for mark in marks:
            others = [other for other in marks if other != mark and mark in other]
            if not mark or others:
                raise ValueError(f"The mark {mark!r} is empty or lies within {others}.")
        self.first_chars = "".join(sorted({mark[0] for mark in marks}))
        self._any = re.compile("|".join(re.escape(mark) for mark in marks))
        self._first = re.compile(f"[{re.escape(self.first_chars)}]") if marks else None
        self._beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, marks), default=0)

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """The leftmost mark from `start` and where it begins.

        Without one: None, and where the text ends that can be no part of a mark any more.
        """
        if self._first is None or self._first.search(text, start) is None:
            return len(text), None
        found = self._any.search(text, start)
        if found is not None:
            return found.start(), found.group()
        return self._beginning(text, max(start, len(text) - self._longest + 1)), None

    def at(self, text: str, position: int) -> str | None:
        """The mark at this very position; "" if it may be the beginning of one, None if not."""
        found = self._any.match(text, position) if self._first is not None else None
        if found is not None:
            return found.group()
        rest = text[position : position + self._longest]
        return "" if rest in self._beginnings and position + len(rest) == len(text) else None

    def _beginning(self, text: str, start: int) -> int:
        """Where the end of the text begins to look like a mark; its length if it does not."""
        while (found := self._first.search(text, start)) is not None:  # type: ignore[union-attr]
            start = found.start()
            if text[start:] in self._beginnings:
                return start
            start += 1
        return len(text)
