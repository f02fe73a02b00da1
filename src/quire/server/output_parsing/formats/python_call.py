"""A call as Python writes it: `name(key=literal, ...)`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.python_literal import (
    CLOSERS,
    MAX_BLANKS,
    MAX_LITERAL_CHARS,
    QUOTE,
    python_as_json,
    string_end,
)
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

_BLANKS = r"[ \t\r\n]{0,512}+"
NAME = re.compile(rf"{_BLANKS}([\w.\-]{{1,{MAX_HEAD_CHARS}}})\(")
KEY = re.compile(rf"{_BLANKS}(?:(\))|(\w{{1,{MAX_HEAD_CHARS}}}){_BLANKS}=)")
NAME_BEGINNING = re.compile(rf"{_BLANKS}[\w.\-]{{0,{MAX_HEAD_CHARS}}}")
KEY_BEGINNING = re.compile(rf"{_BLANKS}\w{{0,{MAX_HEAD_CHARS}}}{_BLANKS}")
STRUCTURE = re.compile(r"""[\[\](){},]|['"]""")
AFTER_VALUE = ")]"
"""Brackets that may follow the last value: the call's, and that of a list of calls."""

Step = tuple[int, Outcome | None]


class PythonCall:
    """Reads one call with keyword arguments, each of which is written when it is complete.

    The call starts when its first argument is complete, or at the `)` of an empty one: before, it
    may be prose. An argument that is not a literal ends it, and is content.
    """

    __slots__ = ("_closers", "_key", "_name", "_next", "_num_chars", "_num_written", "_quote",
                 "_started", "_value")  # fmt: skip

    def __init__(self) -> None:
        self._name = self._key = self._quote = ""
        self._value: list[str] = []
        self._closers = AFTER_VALUE
        self._num_chars = self._num_written = 0
        self._started = False
        self._next: Callable[[str, int, Writer], Step] = self._read_name

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """End of the call in this text."""
        outcome: Outcome | None = None
        while outcome is None:
            start, outcome = self._next(text, start, out)
        if outcome is End.MISFIT and self._started:
            out.content("".join(self._value))
            self._value.clear()
        return start, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """An argument that was cut short is left out; no other bracket follows the last one."""
        if self._next == self._read_value:
            # enough blanks to settle what the text after a last quote would have said
            self.read(rest + " " * (MAX_BLANKS + 4), 0, out)

    def _read_name(self, text: str, start: int, out: Writer) -> Step:
        found = NAME.match(text, start)
        if found is None or not found[1].strip(".-"):
            return _more(NAME_BEGINNING, text, start)
        self._name, self._next = found[1], self._read_key
        return found.end(), None

    def _read_key(self, text: str, start: int, out: Writer) -> Step:
        found = KEY.match(text, start)
        if found is None:
            return _more(KEY_BEGINNING, text, start)
        if found[1]:
            return found.end(), self._close(out)
        self._key, self._next = found[2], self._read_value
        self._value.append(found[0])
        return found.end(), None

    def _read_value(self, text: str, start: int, out: Writer) -> Step:
        end, is_complete = self._value_end(text, start)
        self._value.append(text[start:end])
        self._num_chars += end - start
        if self._num_chars > MAX_LITERAL_CHARS:
            return end, End.MISFIT
        if not is_complete:
            return end, End.MORE
        value = python_as_json("".join(self._value[1:]))
        # a closing bracket of a list may stand there, which the call has not opened
        if value is None or text[end] not in "),":
            return end, End.MISFIT
        if not self._started:
            out.start_call(self._name)
            self._started = True
        out.arguments(f"{', ' if self._num_written else '{'}{json.dumps(self._key)}: {value}")
        self._num_written += 1
        self._value.clear()
        self._num_chars, self._next = 0, self._read_key
        return end + 1, None if text[end] == "," else self._close(out)

    def _value_end(self, text: str, start: int) -> tuple[int, bool]:
        """End of the value, and whether that is sure: a last quote may be the first of three."""
        while True:
            if self._quote:
                start, is_over = string_end(text, start, self._quote, self._closers)
                if not is_over:
                    return start, False
                self._quote = ""
            found = STRUCTURE.search(text, start)
            if found is None:
                return len(text), False
            token = found[0]
            if token in "'\"":
                if text[found.start() :] in (token, token * 2):
                    return found.start(), False
                quote = QUOTE.match(text, found.start())
                assert quote is not None, "it begins with a quote"
                self._quote, start = quote[1], quote.end()
                continue
            if self._closers == AFTER_VALUE and token in ")]},":
                return found.start(), True
            if token in CLOSERS:
                self._closers = CLOSERS[token] + self._closers
            elif token != ",":
                self._closers = self._closers[1:]
            start = found.end()

    def _close(self, out: Writer) -> End:
        if not self._started:
            out.start_call(self._name)
        out.arguments("}" if self._num_written else "{}")
        return End.DONE


def _more(beginning: re.Pattern[str], text: str, start: int) -> tuple[int, End]:
    """The end of an incomplete text: more is needed if this may be the expression's beginning."""
    is_beginning = beginning.fullmatch(text, start) is not None
    return start, End.MORE if is_beginning else End.MISFIT
