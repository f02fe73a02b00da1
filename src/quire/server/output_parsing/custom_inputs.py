"""The inputs of custom tools: a text, which the model writes as the one argument of a function."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from quire.server.output_parsing.events import ArgumentText, CallStarted, Event
from quire.server.output_parsing.json_string import JsonString

INPUT = "input"
"""The name of the argument."""

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_BARE_OPENING = f'{{"{INPUT}":"'


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
        self._string = JsonString()
        self._read = self._before

    def read(self, text: str) -> str:
        """The input that the next piece adds; what may be half of an escape is held back."""
        return self._read(text)

    def finish(self) -> str:
        """Returns the text that is held when the arguments have ended."""
        held, self._held = self._held, ""
        return held + self._string.finish()

    def _before(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if found := _OPENING.match(text):
            self._read = self._string.read
            return self._read(text[found.end() :])
        compact = "".join(text.split())
        # the opening may still become whole
        if _BARE_OPENING.startswith(compact) and len(compact) < len(_BARE_OPENING):
            self._held = text
            return ""
        self._read = _as_it_is
        return text


def _as_it_is(text: str) -> str:
    return text
