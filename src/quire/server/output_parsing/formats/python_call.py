"""A call as Python writes it: `name(key=literal, ...)`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.output_parsing.delimiters import NON_BLANK
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.python_value import PythonValue
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

NAME = re.compile(r"[\w.\-]*+")
KEY = re.compile(r"\w*+")

Step = tuple[int, Outcome | None]


class PythonCall:
    """Reads one call with keyword arguments.

    The call starts at its first `key=`, or at the `)` of an empty one: `name(` alone is also how
    prose looks. What is no literal ends it, and is content from there on.
    """

    __slots__ = ("_name", "_next", "_started", "_value", "_word")

    def __init__(self) -> None:
        self._name = ""
        self._word = ""
        self._started = False
        self._value: PythonValue | None = None
        self._next: Callable[[str, int, Writer], Step] = self._name_text

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """How far the call goes."""
        outcome: Outcome | None = None
        while outcome is None:
            start, outcome = self._next(text, start, out)
        if outcome is End.MISFIT and self._started:
            out.content(self._word)
        return start, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """Arguments are written as far as they came."""
        if self._value is not None:
            self._value.finish(rest)
        elif self._word and self._started:
            out.arguments(", " + json.dumps(self._word, ensure_ascii=False))

    def _take(self, pattern: re.Pattern[str], text: str, start: int) -> tuple[int, End | None]:
        """More of a name, which ends where the text goes on with something else."""
        found = pattern.match(text, start)
        end = found.end() if found else start
        limit = min(end, start + MAX_HEAD_CHARS - len(self._word))
        self._word += text[start:limit]
        if limit < end:
            return limit, End.MISFIT
        return end, End.MORE if end == len(text) else None

    def _name_text(self, text: str, start: int, out: Writer) -> Step:
        if not self._word:
            start = _next_char(text, start)
        start, end = self._take(NAME, text, start)
        if end is not None:
            return start, end
        if text[start] != "(" or not self._word.strip(".-"):
            return start, End.MISFIT
        self._name, self._word, self._next = self._word, "", self._key_start
        return start + 1, None

    def _key_start(self, text: str, start: int, out: Writer) -> Step:
        start = _next_char(text, start)
        if start == len(text):
            return start, End.MORE
        if text[start] == ")":
            return start + 1, self._close(out)
        self._next = self._key_text
        return start, None

    def _key_text(self, text: str, start: int, out: Writer) -> Step:
        start, end = self._take(KEY, text, start)
        if end is None:
            end = None if self._word else End.MISFIT
            self._next = self._equals
        return start, end

    def _equals(self, text: str, start: int, out: Writer) -> Step:
        start = _next_char(text, start)
        if start == len(text):
            return start, End.MORE
        if text[start] != "=":
            return start, End.MISFIT
        if not self._started:
            out.start_call(self._name)
        out.arguments((", " if self._started else "{") + f"{json.dumps(self._word)}: ")
        self._started, self._word = True, ""
        self._value, self._next = PythonValue(out.arguments), self._value_text
        return start + 1, None

    def _value_text(self, text: str, start: int, out: Writer) -> Step:
        assert self._value is not None, "set where this step is"
        start, end = self._value.read(text, start)
        if end is not End.DONE:
            return start, end
        self._value, self._next = None, self._after_value
        return start, None

    def _after_value(self, text: str, start: int, out: Writer) -> Step:
        start = _next_char(text, start)
        if start == len(text):
            return start, End.MORE
        if text[start] == ")":
            return start + 1, self._close(out)
        self._next = self._key_start
        return (start + 1, None) if text[start] == "," else (start, End.MISFIT)

    def _close(self, out: Writer) -> End:
        if not self._started:
            out.start_call(self._name)
        out.arguments("}" if self._started else "{}")
        return End.DONE


def _next_char(text: str, start: int) -> int:
    """Where the next character stands that is not blank; the text's length without one."""
    found = NON_BLANK.search(text, start)
    return len(text) if found is None else found.start()
