"""Finds the first stop string that a growing text completes, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string and where it lies in the whole text: from `start` up to `end`."""

    stop: str
    start: int
    end: int


class StopStringFinder:
    """Searches each character of a text once, plus those before it in which a stop string may
    begin. Of several matches the one that ends first wins; of those, the one listed first.
    Invariant: `_tail` is the end of the text seen so far, one character less than the longest stop
    string.
    """

    __slots__ = ("_length", "_reach", "_stops", "_tail")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) - 1
        self._tail = ""
        self._length = 0

    def skip(self, text: str) -> None:
        """Add text in which no match may end, though one may begin."""
        self._length += len(text)
        self._tail = self._end_of(self._tail + text)

    def feed(self, text: str) -> StopMatch | None:
        """The first match that ends within `text`, which goes on from the earlier text, or None."""
        tail = self._tail
        window = tail + text
        best: tuple[str, int, int] | None = None
        for stop in self._stops:
            # from where a match would end within the new text: earlier ones were not found before
            start = window.find(stop, max(0, len(tail) + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[2]):
                best = (stop, start, start + len(stop))
        offset = self._length - len(tail)
        self._length += len(text)
        self._tail = self._end_of(window)
        return None if best is None else StopMatch(best[0], best[1] + offset, best[2] + offset)

    def _end_of(self, text: str) -> str:
        return text[-self._reach :] if self._reach else ""


def length_of_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that is a proper prefix of a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while 0 <= start < len(text) - longest:
            if stop.startswith(text[start:]):
                longest = len(text) - start
                break
            start = text.find(stop[0], start + 1)
    return longest
