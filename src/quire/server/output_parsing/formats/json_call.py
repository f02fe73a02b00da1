"""A call written as one JSON object that has its name and its arguments among its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from quire.server.output_parsing.delimiters import NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import FIRST_CHARS, JsonValue, ObjectInString
from quire.server.output_parsing.state_table import ToolFormat
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

NO_DELIMITERS = Delimiters(())
MAX_STRING_CHARS = 12 * MAX_HEAD_CHARS
"""The most characters of a key or a name as written; an escape may take twelve of them."""
STRING = re.compile(rf'"(?:[^"\\]|\\.){{0,{MAX_STRING_CHARS}}}+"', re.DOTALL)

Step = tuple[int, Outcome | None]


class JsonCall:
    """Reads one object, in whichever order its keys come.

    The call starts when its name is known and its arguments begin; until then, anything that the
    object cannot be says that this is not a call. `names` are those of the request's tools. The
    first name and the first arguments count; other keys are part of the markup.
    """

    __slots__ = ("_decoded", "_early", "_format", "_has_arguments", "_is_first", "_key",
                 "_delimiters", "_name", "_names", "_next", "_started", "_value")  # fmt: skip

    def __init__(
        self, tool_format: ToolFormat, delimiters: Delimiters, names: Collection[str]
    ) -> None:
        self._format = tool_format
        self._names = names if tool_format.only_known_names else None
        self._delimiters = delimiters
        self._key: Any = None
        self._name: str | None = None
        self._early: list[str] = []
        self._decoded = ObjectInString()
        self._has_arguments = False
        self._is_first = True
        self._started = False
        self._value = JsonValue(NO_DELIMITERS)
        self._next: Callable[[str, int, str, Writer], Step] = self._open

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """End of the object. A delimiter counts before it, and once its call has started."""
        outcome: Outcome | None = None
        while outcome is None:
            if self._next in (self._arguments, self._other_value):
                start, outcome = self._next(text, start, "", out)
                continue
            found = NON_BLANK.search(text, start)
            if found is None:
                return len(text), End.MORE
            start, outcome = self._next(text, found.start(), found.group(), out)
        return start, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """The output ended here; arguments are passed on as far as they came."""
        if self._started and self._next == self._arguments:
            out.arguments(self._decoded.read(rest) + self._decoded.finish())

    # Each step is given the text and where in it the next character that is not blank stands.

    def _open(self, text: str, start: int, char: str, out: Writer) -> Step:
        delimiter = self._delimiters.at(text, start)
        if delimiter is not None:
            return start, delimiter or End.MORE
        self._next = self._key_text
        return (start + 1, None) if char == "{" else (start, End.MISFIT)

    def _key_text(self, text: str, start: int, char: str, out: Writer) -> Step:
        if char == "}" and self._is_first:
            return start + 1, self._close(out)
        start, self._key, outcome = _string(text, start)
        if outcome is None and not self._is_allowed(self._key):
            return start, End.MISFIT
        self._is_first, self._next = False, self._next if outcome else self._colon
        return start, outcome

    def _is_allowed(self, key: str) -> bool:
        others = self._format.other_keys
        known = (self._format.name_key, *self._format.argument_keys)
        return self._started or others is None or key in known or key in others

    def _colon(self, text: str, start: int, char: str, out: Writer) -> Step:
        self._next = self._value_start
        return (start + 1, None) if char == ":" else (start, End.MISFIT)

    def _value_start(self, text: str, start: int, char: str, out: Writer) -> Step:
        if char not in FIRST_CHARS:
            return start, End.MISFIT
        if self._format.names_are_keys and not self._started:
            if char != "{" or not self._is_known(self._key):
                return start, End.MISFIT
            self._name = self._key
            self._begin_arguments(out)
        elif self._key == self._format.name_key and self._name is None:
            self._next = self._name_text
        elif self._key in self._format.argument_keys and not self._has_arguments:
            self._begin_arguments(out)
        else:
            counts = self._delimiters if self._started else NO_DELIMITERS
            self._value, self._next = JsonValue(counts), self._other_value
        return start, None

    def _begin_arguments(self, out: Writer) -> None:
        self._has_arguments = True
        self._value, self._next = JsonValue(self._delimiters), self._arguments
        self._start_if_known(out)

    def _is_known(self, name: Any) -> bool:
        return is_name(name) and (self._names is None or name in self._names)

    def _name_text(self, text: str, start: int, char: str, out: Writer) -> Step:
        end, name, outcome = _string(text, start)
        if outcome is not None:
            return end, outcome
        if not self._is_known(name):
            return end, End.MISFIT
        self._name, self._next = name, self._comma
        self._start_if_known(out)
        return end, None

    def _start_if_known(self, out: Writer) -> None:
        if self._name is not None and self._has_arguments:
            self._started = True
            out.start_call(self._name)
            out.arguments("".join(self._early))

    def _arguments(self, text: str, start: int, char: str, out: Writer) -> Step:
        end, outcome = self._value.read(text, start)
        written = self._decoded.read(text[start:end])
        if outcome is not End.MORE:
            written += self._decoded.finish()
        if self._started:
            out.arguments(written)
        else:
            self._early.append(written)
        return self._after_value(end, outcome)

    def _other_value(self, text: str, start: int, char: str, out: Writer) -> Step:
        return self._after_value(*self._value.read(text, start))

    def _after_value(self, start: int, outcome: Outcome) -> Step:
        if outcome is End.DONE:
            self._next = self._comma
            return start, None
        # a delimiter within something that has not become a call is text
        if isinstance(outcome, str) and not self._started:
            return start, End.MISFIT
        return start, outcome

    def _comma(self, text: str, start: int, char: str, out: Writer) -> Step:
        delimiter = self._delimiters.at(text, start) if self._started else None
        if delimiter is not None:
            return start, delimiter or End.MORE
        if char == "}":
            return start + 1, self._close(out)
        self._next = self._key_text
        return (start + 1, None) if char == "," else (start, End.MISFIT)

    def _close(self, out: Writer) -> End:
        if self._started:
            return End.DONE
        if self._name is None or not self._format.lone_names:
            return End.MISFIT
        out.start_call(self._name)
        out.arguments("{}")
        return End.DONE


def _string(text: str, start: int) -> tuple[int, Any, End | None]:
    """The string at `start` decoded, and where it ends; MORE while it is not complete."""
    found = STRING.match(text, start)
    if found is None:
        may_come = text[start] == '"' and len(text) - start <= MAX_STRING_CHARS
        return start, None, End.MORE if may_come else End.MISFIT
    try:
        return found.end(), json.loads(found[0]), None
    except ValueError:
        return start, None, End.MISFIT


def is_name(value: Any) -> bool:
    """Whether a decoded value can be the name of a tool: text that can be sent on."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_HEAD_CHARS:
        return False
    # a lone surrogate cannot be encoded as UTF-8
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
