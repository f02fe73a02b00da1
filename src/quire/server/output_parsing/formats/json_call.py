"""A call written as one JSON object that has its name and its arguments among its keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quire.server.output_parsing.delimiters import NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import FIRST_CHARS, JsonValue
from quire.server.output_parsing.state_table import ToolFormat
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

NAME_KEY = "name"
NO_DELIMITERS = Delimiters(())

Step = tuple[int, Outcome | None]


class JsonCall:
    """Reads one object, in whichever order its keys come.

    The call starts when its name is known and its arguments begin; until then, anything that the
    object cannot be says that this is no call. The first name and the first arguments count; other
    keys are part of the markup.
    """

    __slots__ = ("_early", "_format", "_has_arguments", "_key", "_delimiters", "_name", "_next",
                 "_raw", "_started", "_value")  # fmt: skip

    def __init__(self, tool_format: ToolFormat, delimiters: Delimiters) -> None:
        self._format = tool_format
        self._delimiters = delimiters
        self._key: Any = None
        self._name: str | None = None
        self._early: list[str] = []
        self._has_arguments = False
        self._started = False
        self._raw: list[str] = []
        self._value = JsonValue(NO_DELIMITERS)
        self._next: Callable[[str, int, Writer], Step] = self._open

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """How far the object goes. A delimiter counts before it, and once its call has started."""
        outcome: Outcome | None = None
        while outcome is None:
            start, outcome = self._next(text, start, out)
        return start, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """The output ended here; arguments are passed on as far as they came."""
        if self._started and self._next == self._arguments and rest:
            out.arguments(rest)

    def _char(self, text: str, start: int, allowed: str) -> tuple[int, Outcome | str]:
        """The next character that is not blank, if it is one of those allowed."""
        found = NON_BLANK.search(text, start)
        if found is None:
            return len(text), End.MORE
        return found.start(), found.group() if found.group() in allowed else End.MISFIT

    def _open(self, text: str, start: int, out: Writer) -> Step:
        found = NON_BLANK.search(text, start)
        if found is None:
            return len(text), End.MORE
        start = found.start()
        delimiter = self._delimiters.at(text, start)
        if delimiter is not None:
            return start, delimiter or End.MORE
        if text[start] != "{":
            return start, End.MISFIT
        self._next = self._first_key
        return start + 1, None

    def _first_key(self, text: str, start: int, out: Writer) -> Step:
        start, char = self._char(text, start, '"}')
        if char == "}":
            return start + 1, self._close(out)
        return self._to_key(start, char)

    def _later_key(self, text: str, start: int, out: Writer) -> Step:
        return self._to_key(*self._char(text, start, '"'))

    def _to_key(self, start: int, char: Outcome) -> Step:
        if isinstance(char, End):
            return start, char
        self._begin_value(NO_DELIMITERS, self._key_text)
        return start, None

    def _begin_value(
        self, delimiters: Delimiters, then: Callable[[str, int, Writer], Step]
    ) -> None:
        self._value = JsonValue(delimiters)
        self._raw.clear()
        self._next = then

    def _literal(self, text: str, start: int) -> tuple[int, Any, End | None]:
        """A string of the object, decoded once it is complete."""
        end, outcome = self._value.read(text, start)
        self._raw.append(text[start:end])
        if outcome is not End.DONE:
            return end, None, End.MORE
        try:
            return end, json.loads("".join(self._raw)), None
        except ValueError:
            return end, None, End.MISFIT

    def _key_text(self, text: str, start: int, out: Writer) -> Step:
        start, self._key, end = self._literal(text, start)
        self._next = self._colon
        if end is End.MORE:
            self._next = self._key_text
        return start, end

    def _colon(self, text: str, start: int, out: Writer) -> Step:
        start, char = self._char(text, start, ":")
        if isinstance(char, End):
            return start, char
        self._next = self._value_start
        return start + 1, None

    def _value_start(self, text: str, start: int, out: Writer) -> Step:
        is_name = self._key == NAME_KEY and self._name is None
        start, char = self._char(text, start, '"' if is_name else FIRST_CHARS)
        if isinstance(char, End):
            return start, char
        if is_name:
            self._begin_value(NO_DELIMITERS, self._name_text)
        elif self._key in self._format.argument_keys and not self._has_arguments:
            self._has_arguments = True
            self._begin_value(self._delimiters, self._arguments)
            self._start_if_known(out)
        else:
            self._begin_value(
                self._delimiters if self._started else NO_DELIMITERS, self._other_value
            )
        return start, None

    def _name_text(self, text: str, start: int, out: Writer) -> Step:
        start, name, end = self._literal(text, start)
        if end is not None:
            return start, end
        if not is_name(name):
            return start, End.MISFIT
        self._name = name
        self._start_if_known(out)
        self._next = self._comma
        return start, None

    def _start_if_known(self, out: Writer) -> None:
        if self._name is not None and self._has_arguments:
            self._started = True
            out.start_call(self._name)
            out.arguments("".join(self._early))

    def _arguments(self, text: str, start: int, out: Writer) -> Step:
        end, outcome = self._value.read(text, start)
        if self._started:
            out.arguments(text[start:end])
        else:
            self._early.append(text[start:end])
        return self._after_value(end, outcome)

    def _other_value(self, text: str, start: int, out: Writer) -> Step:
        return self._after_value(*self._value.read(text, start))

    def _after_value(self, start: int, outcome: Outcome) -> Step:
        if outcome is End.DONE:
            self._next = self._comma
            return start, None
        if isinstance(outcome, str) and not self._started:
            return start, End.MISFIT
        return start, outcome

    def _comma(self, text: str, start: int, out: Writer) -> Step:
        found = NON_BLANK.search(text, start)
        if found is None:
            return len(text), End.MORE
        start = found.start()
        delimiter = self._delimiters.at(text, start) if self._started else None
        if delimiter is not None:
            return start, delimiter or End.MORE
        if text[start] == "}":
            return start + 1, self._close(out)
        self._next = self._later_key
        return (start + 1, None) if text[start] == "," else (start, End.MISFIT)

    def _close(self, out: Writer) -> End:
        if self._started:
            return End.DONE
        if self._name is None or not self._format.lone_names:
            return End.MISFIT
        out.start_call(self._name)
        out.arguments("{}")
        return End.DONE


def is_name(value: Any) -> bool:
    """Whether a decoded value can be the name of a tool: text that can be sent on."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_HEAD_CHARS:
        return False
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
