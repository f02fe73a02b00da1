"""An object as Gemma's models write it: `{city:<|"|>Bonn<|"|>,days:2}`, keys without quotes and
strings between marks of their own, so that nothing in them is escaped.
"""

from __future__ import annotations

import json
import re

from quire.server.output_parsing.delimiters import BLANKS, NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import json_type
from quire.server.output_parsing.formats.parameters_as_text import Parameters, typed_json
from quire.server.output_parsing.json_string import within_quotes
from quire.server.output_parsing.state_table import Key, ParserState
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

STRUCTURE = ("{", "}", "[", "]", ",")
SCALARS = frozenset({"number", "integer", "boolean", "null"})
CLOSING = {"{": "}", "[": "]"}


class LooseObject:
    """Reads the rest of an object after its `{`.

    A string whose type the schema does not contradict is passed on as it comes, another value when
    it is complete. What is neither a key nor a value ends the object and is content.
    """

    __slots__ = ("_depth", "_in_mark", "_key", "_mark", "_next", "_outside", "_parameters",
                 "_state", "_text", "_within")  # fmt: skip

    def __init__(self, state: ParserState, parameters: Parameters) -> None:
        self._state = state
        self._mark = state.mark
        self._parameters = parameters
        self._outside = Delimiters((state.mark, *STRUCTURE, *state.delimiters))
        self._within = Delimiters((state.mark,))
        mark = re.escape(state.mark)
        self._key = re.compile(
            rf"[ \t\r\n]{{0,{MAX_HEAD_CHARS}}}+"
            rf"(?:(\}})|(?:{mark})?([^:{{}}\[\],<>]{{1,{MAX_HEAD_CHARS}}}?)(?:{mark})?:)"
        )
        self._next = self._read_key
        self._text: list[str] = []
        self._depth = 0
        self._in_mark = False

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Read on; the end of the object, or of what has come of it."""
        outcome: Outcome | None = None
        while outcome is None:
            start, outcome = self._next(text, start, out)
        if outcome is End.MISFIT:
            out.content("".join(self._text))
        return start, outcome

    def finish(self, rest: str, out: Writer) -> None:
        """The output ended here: what was cut short is written as far as it came."""
        if self._next == self._read_text:
            out.arguments(within_quotes(rest))
        elif self._next == self._read_value:
            out.arguments("".join(self._text) + rest)
        elif self._next == self._read_key and rest.strip(BLANKS):
            self._parameters.expect(Key(rest.strip(BLANKS)))
            self._parameters.write_key(out)
        elif self._next == self._read_value_start:
            self._parameters.write_key(out)

    def _read_key(self, text: str, start: int, out: Writer) -> tuple[int, Outcome | None]:
        found = self._key.match(text, start)
        if found is None:
            at = NON_BLANK.search(text, start)
            delimiter = None if at is None else self._outside.at(text, at.start())
            if at is not None and delimiter in self._state.delimiters:
                assert delimiter is not None
                return at.start(), delimiter
            is_cut = len(text) - start <= MAX_HEAD_CHARS and not set("{}[],").intersection(
                text[start:]
            )
            return start, End.MORE if is_cut else End.MISFIT
        if found[1]:
            self._parameters.close(out)
            return found.end(), End.DONE
        self._parameters.expect(Key(found[2].strip(BLANKS)))
        self._next = self._read_value_start
        return found.end(), None

    def _read_value_start(self, text: str, start: int, out: Writer) -> tuple[int, Outcome | None]:
        at = NON_BLANK.search(text, start)
        if at is None:
            return start, End.MORE
        start = at.start()
        delimiter = self._within.at(text, start)
        if delimiter == "":
            return start, End.MORE
        self._parameters.write_key(out)
        out.arguments(": ")
        # a string in marks may be a number to the schema, which only the whole of it shows
        if delimiter is None or not self._parameters.types(out) <= {"string"}:
            self._next = self._read_value
            return start, None
        out.arguments('"')
        self._next = self._read_text
        return start + len(delimiter), None

    def _read_text(self, text: str, start: int, out: Writer) -> tuple[int, Outcome | None]:
        """A string, up to the mark that ends it."""
        end, delimiter = self._within.find(text, start)
        out.arguments(within_quotes(text[start:end]))
        if delimiter is None:
            return end, End.MORE
        out.arguments('"')
        self._next = self._read_comma
        return end + len(delimiter), None

    def _read_value(self, text: str, start: int, out: Writer) -> tuple[int, Outcome | None]:
        """Another value, up to the comma or bracket after it."""
        while True:
            marks = self._within if self._in_mark else self._outside
            end, delimiter = marks.find(text, start)
            self._text.append(text[start:end])
            if delimiter is None:
                return end, End.MORE
            is_end = not self._in_mark and (
                delimiter in self._state.delimiters or (not self._depth and delimiter in ",}]")
            )
            if is_end:
                written = "".join(self._text)
                self._text.clear()
                out.arguments(value_json(written, self._mark, self._parameters.types(out)))
                self._next = self._read_comma
                return end, None
            self._in_mark ^= delimiter == self._mark
            self._depth += (delimiter in "{[") - (delimiter in "}]") if not self._in_mark else 0
            self._text.append(delimiter)
            start = end + len(delimiter)

    def _read_comma(self, text: str, start: int, out: Writer) -> tuple[int, Outcome | None]:
        at = NON_BLANK.search(text, start)
        if at is None:
            return start, End.MORE
        delimiter = self._outside.at(text, at.start())
        if delimiter == ",":
            self._next = self._read_key
            return at.end(), None
        if delimiter == "}":
            self._parameters.close(out)
            return at.end(), End.DONE
        if delimiter == "":
            return at.start(), End.MORE
        is_known = delimiter in self._state.delimiters
        return at.start(), delimiter if delimiter is not None and is_known else End.MISFIT


def value_json(text: str, mark: str, types: frozenset[str]) -> str:
    """A whole value's JSON, of one of `types` if it can be; empty: the schema does not say."""
    text = text.strip(BLANKS)
    if text.startswith(mark) and text.endswith(mark) and text.count(mark) == 2:
        return typed_json(text[len(mark) : -len(mark)], types or frozenset({"string"}), False)
    if text[:1] in CLOSING:
        translated = _translated(text, mark)
        if translated is not None:
            return translated
    return typed_json(text, types or SCALARS, False)


def _translated(text: str, mark: str) -> str | None:
    """A list or object as JSON; None where it is neither."""
    token = re.compile(
        rf"{re.escape(mark)}((?s:.*?)){re.escape(mark)}|([{{}}\[\],:])|([^{{}}\[\],:]+)"
    )
    written: list[str] = []
    open_brackets: list[str] = []
    at = 0
    while at < len(text):
        found = token.match(text, at)
        if found is None:
            return None
        string, char, word = found.groups()
        at = found.end()
        if char is not None:
            written.append(", " if char == "," else ": " if char == ":" else char)
            if char in CLOSING:
                open_brackets.append(char)
            elif char in "]}" and (not open_brackets or CLOSING[open_brackets.pop()] != char):
                return None
        elif word is not None and not word.strip(BLANKS):
            continue
        elif string is not None:
            written.append(json.dumps(string, ensure_ascii=False))
        else:
            is_key = text[at : at + 1] == ":" and open_brackets[-1:] == ["{"]
            value = word.strip(BLANKS)
            is_scalar = not is_key and json_type(value) in SCALARS
            written.append(value if is_scalar else json.dumps(value, ensure_ascii=False))
    translated = "".join(written)
    return translated if json_type(translated) in ("object", "array") else None
