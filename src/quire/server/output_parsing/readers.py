"""Readers of the states' texts that need little: passages, heads, blanks, arguments as written.

Each `read(text, start, out)` writes what it is sure of and gives back how far it came and why it
stopped. Whatever it did not take is given to it again, with more text after it.
"""

from __future__ import annotations

from typing import Protocol

from quire.server.output_parsing.delimiters import BLANKS, NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import JsonValue, ObjectInString
from quire.server.output_parsing.state_table import ParserState, Reads
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer


class Reader(Protocol):
    """Reader of the text of one state, from entering it to leaving it."""

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Take text from `start`; see the module."""
        ...

    def finish(self, rest: str, out: Writer) -> None:
        """The output ended here; `rest` is what was not taken."""
        ...


class TextReader:
    """Text up to a delimiter: content, reasoning, or arguments as written (none are an object)."""

    __slots__ = ("_delimiters", "_is_empty", "_leaves", "_reads", "_trims")

    def __init__(self, state: ParserState, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._reads = state.reads
        self._leaves = state.then is not None
        self._trims = state.trims
        self._is_empty = True

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """All that cannot be the beginning of a delimiter."""
        end, delimiter = self._delimiters.find(text, start)
        if self._reads is Reads.REASONING:
            out.reasoning(text[start:end])
        elif self._reads is Reads.TEXT:
            out.arguments(text[start:end])
            self._is_empty = self._is_empty and NON_BLANK.search(text, start, end) is None
            out.arguments("{}" if delimiter and self._is_empty else "")
        elif self._leaves and (found := NON_BLANK.search(text, start, end)) is not None:
            out.content("" if self._trims else text[start : found.start()])
            return found.start(), End.DONE
        elif not self._trims:
            out.content(text[start:end])
        return end, delimiter or End.MORE

    def finish(self, rest: str, out: Writer) -> None:
        """The beginning of a delimiter that never came is text."""
        match self._reads:
            case Reads.REASONING:
                out.reasoning(rest)
            case Reads.TEXT:
                out.arguments(rest)
            case _:
                out.finish(rest)


class Undecided:
    """Blanks before a delimiter; the writer holds them."""

    __slots__ = ("_delimiters", "_misfit", "_skips")

    def __init__(self, state: ParserState, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._misfit = End.MISFIT if state.then is None else End.DONE
        # a delimiter that begins with a blank may begin at any of them
        self._skips = not any(char in BLANKS for char in delimiters.first_chars)

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Read up to the first character that is not blank, unless a delimiter may be there."""
        while start < len(text):
            if self._skips:
                found = NON_BLANK.search(text, start)
                start = len(text) if found is None else found.start()
            if (delimiter := self._delimiters.at(text, start)) is not None:
                return start, delimiter or End.MORE
            if NON_BLANK.match(text, start) is not None:
                return start, self._misfit
            start = min(start + 1, len(text))
        return start, End.MORE

    def finish(self, rest: str, out: Writer) -> None:
        """The parser releases what is held."""


class HeadReader:
    """Reader of a head, which says what comes next; the writer holds it. `text` so far."""

    __slots__ = ("_has_begun", "_delimiters", "_state", "_text", "num_chars")

    def __init__(self, state: ParserState, delimiters: Delimiters) -> None:
        self._state = state
        self._delimiters = delimiters
        self._text: list[str] = []
        self.num_chars = 0
        self._has_begun = not state.begins

    @property
    def text(self) -> str:
        """The head as a whole, once its delimiter was met."""
        return "".join(self._text)

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Read up to a delimiter; too much text, or a character that no head has, is a misfit."""
        if not self._has_begun:
            rest = text[start : start + MAX_HEAD_CHARS]
            if not rest.startswith(self._state.begins):
                may_begin = any(beginning.startswith(rest) for beginning in self._state.begins)
                return start, End.MORE if may_begin else End.MISFIT
            self._has_begun = True
        end, delimiter = self._delimiters.find(text, start)
        limit = self._end(text, start, min(end, start + MAX_HEAD_CHARS - self.num_chars))
        self._text.append(text[start:limit])
        self.num_chars += limit - start
        if limit < end:
            return limit, End.MISFIT
        return end, delimiter or End.MORE

    def _end(self, text: str, start: int, end: int) -> int:
        found = [text.find(char, start, end) for char in self._state.bars]
        return min((place for place in found if place >= 0), default=end)

    def finish(self, rest: str, out: Writer) -> None:
        """The parser releases what is held."""


class JsonReader:
    """Arguments as one JSON value, as written. None are an empty object."""

    __slots__ = ("_decoded", "_has_begun", "_is_empty", "_value")

    def __init__(self, delimiters: Delimiters) -> None:
        self._value = JsonValue(delimiters)
        self._decoded = ObjectInString()
        self._has_begun = False
        self._is_empty = True

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Blanks before the value are markup."""
        if not self._has_begun:
            found = NON_BLANK.search(text, start)
            if found is None:
                return len(text), End.MORE
            start, self._has_begun = found.start(), True
        end, outcome = self._value.read(text, start)
        self._is_empty = self._is_empty and end == start
        out.arguments(self._decoded.read(text[start:end]))
        if outcome is not End.MORE:
            out.arguments("{}" if self._is_empty else self._decoded.finish())
        return end, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """The beginning of a delimiter that never came belongs to the arguments."""
        out.arguments(self._decoded.read(rest) + self._decoded.finish())
