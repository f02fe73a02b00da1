"""The inputs of custom tools: a text, which the model writes as the one argument of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

from quire.server.output_parsing.events import ArgumentText, CallStarted, Event

INPUT = "input"
"""The name of the argument."""

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_BARE_OPENING = f'{{"{INPUT}":"'
_PLAIN = re.compile(r'[^"\\]*+')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_OTHER_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_CHARS = len("\\ud83d")
_MOST_ESCAPE = 2 * _HALF_CHARS


class CustomInputs:
    """Makes the arguments of calls of the tools `names`, `{"input": "..."}`, into their input.

    For every way of cutting the text into pieces the events add up to the same. Arguments of
    another form are the input as they stand.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = -1
        self._reader: _InputReader | None = None

    def decoded(self, events: Iterable[Event], *, is_last: bool) -> list[Event]:
        """The events with inputs in place of arguments."""
        made: list[Event] = []
        for event in events:
            if isinstance(event, ArgumentText) and self._reader is not None:
                self._add(made, self._reader.read(event.text))
                continue
            self._close(made)
            if isinstance(event, CallStarted) and event.name in self._names:
                self._index, self._reader = event.index, _InputReader()
            made.append(event)
        if is_last:
            self._close(made)
        return made

    def _close(self, made: list[Event]) -> None:
        if self._reader is not None:
            self._add(made, self._reader.finish())
            self._reader = None

    def _add(self, made: list[Event], text: str) -> None:
        if text:
            made.append(ArgumentText(self._index, text))


class _InputReader:
    """Reads one `{"input": "..."}` piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        self._read = self._before

    def read(self, text: str) -> str:
        """The input that the next piece adds; what may be half of an escape is held back."""
        text, self._held = self._held + text, ""
        return self._read(text)

    def finish(self) -> str:
        """What is held when the arguments have ended."""
        held, self._held = self._held, ""
        return held

    def _before(self, text: str) -> str:
        if found := _OPENING.match(text):
            self._read = self._inside
            return self._inside(text[found.end() :])
        compact = "".join(text.split())
        if _BARE_OPENING.startswith(compact) and len(compact) < len(_BARE_OPENING):
            self._held = text
            return ""
        self._read = _as_it_is
        return text

    def _inside(self, text: str) -> str:
        pieces, place = [], 0
        while place < len(text):
            plain = _PLAIN.match(text, place)
            assert plain is not None, "it matches nothing too"
            pieces.append(plain[0])
            place = plain.end()
            if text.startswith('"', place):
                self._read = _left_out
                break
            if place < len(text):
                place, piece = self._escape(text, place)
                pieces.append(piece)
        return "".join(pieces)

    def _escape(self, text: str, place: int) -> tuple[int, str]:
        """The character that an escape means, and where it ends; it is held until it is whole."""
        rest = text[place : place + _MOST_ESCAPE]
        is_half = _HALF.match(rest) is not None
        is_open = not _is_lone(rest) if is_half else _may_become_one(rest)
        if is_open and len(rest) < _MOST_ESCAPE:
            self._held = text[place:]
            return len(text), ""
        if is_half and _OTHER_HALF.match(rest, _HALF_CHARS):
            return place + _MOST_ESCAPE, json.loads(f'"{rest}"')
        found = _ESCAPE.match(rest)
        if found is None:
            return place + 1, "\\"
        char = json.loads(f'"{found[0]}"')
        return place + found.end(), "\ufffd" if "\ud800" <= char <= "\udfff" else char


def _may_become_one(rest: str) -> bool:
    """Whether text from a backslash on is the beginning of an escape and not a whole one."""
    return re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", rest) is not None


def _is_lone(rest: str) -> bool:
    """Whether the half of a character at the start cannot be followed by its other half."""
    other = rest[_HALF_CHARS:]
    return re.fullmatch(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,2})?)?)?)?", other) is None


def _as_it_is(text: str) -> str:
    return text


def _left_out(text: str) -> str:
    return ""
