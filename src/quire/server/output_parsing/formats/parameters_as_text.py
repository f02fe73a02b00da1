"""Arguments that a format writes one by one, as text: they become JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from quire.server.output_parsing.delimiters import BLANKS, NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import json_type
from quire.server.output_parsing.formats.python_literal import python_as_json
from quire.server.output_parsing.json_string import within_quotes
from quire.server.output_parsing.state_table import Key, ParserState
from quire.server.output_parsing.stream_writer import Writer
from quire.server.output_parsing.tool_schemas import ToolSchemas

WRAPPERS = frozenset({"arguments", "input", "parameters", "properties"})
"""Names that models give to one argument that holds all the others as JSON."""
MAX_BLANKS = 256
"""Blanks between a delimiter and what follows it; more say that the value has ended."""


class Parameters:
    """The arguments of the call that is being read. `key` is that of the next value."""

    __slots__ = ("_declared", "_is_open", "_schemas", "key")

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self.key = ""
        self._declared = Key(None)
        self._is_open = False

    def start(self) -> None:
        """A new call: nothing is written yet."""
        self._is_open = False

    def expect(self, key: Key) -> None:
        self._declared = key
        self.key = self.key if key.name is None else key.name

    def write_key(self, out: Writer) -> None:
        out.arguments(", " if self._is_open else "{")
        out.arguments(json.dumps(self.key, ensure_ascii=False))
        self._is_open = True

    def types(self, out: Writer, *path: str) -> frozenset[str]:
        """The types that the value of the last key, or what is at a path within it, may have."""
        known = self._schemas.types(out.call_name, self.key, *path)
        return known or (frozenset() if path else self._declared.types)

    def may_hold_all(self, out: Writer) -> bool:
        """Whether the next value may hold all arguments: the first, by a key the tool lacks."""
        if self._is_open or self.key not in WRAPPERS:
            return False
        own = self._schemas.properties(out.call_name)
        # without a schema nobody knows whether the tool has such an argument
        return bool(own) and self.key not in own

    def write_all(self, text: str, out: Writer) -> bool:
        """Write the members of an object of arguments; False if the text is not one."""
        text = text.strip(BLANKS)
        written = text if json_type(text) == "object" else python_as_json(text)
        if written is None or json_type(written) != "object":
            return False
        if not self._schemas.properties(out.call_name).issuperset(
            # integers stay text: only the names count, and Python refuses very long ones
            json.loads(written, parse_int=str)
        ):
            return False
        members = written[1:-1].strip(BLANKS)
        out.arguments("{" + members if members else "")
        self._is_open = bool(members)
        return True

    def close(self, out: Writer) -> None:
        out.arguments("}" if self._is_open else "{}")


class KeyReader:
    """The name of an argument, up to the delimiter after it."""

    __slots__ = ("_delimiters", "_key", "_parameters", "_text")

    def __init__(
        self, key: Callable[[str], Key], delimiters: Delimiters, parameters: Parameters
    ) -> None:
        self._key = key
        self._delimiters = delimiters
        self._parameters = parameters
        self._text: list[str] = []

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """The key is written with its value."""
        end, delimiter = self._delimiters.find(text, start)
        self._text.append(text[start:end])
        if delimiter is None:
            return end, End.MORE
        self._parameters.expect(self._key("".join(self._text)))
        return end, delimiter

    def finish(self, rest: str, out: Writer) -> None:
        """A key that was cut short is written as far as it came."""
        key = self._key("".join(self._text))
        self._parameters.expect(key)
        if key.name is not None:
            self._parameters.key += rest
        self._parameters.write_key(out)


class ValueEnds:
    """Finds the delimiter that ends a value. One that has `followers` counts only before one of
    them: a value may have the delimiter's text within a line.
    """

    __slots__ = ("_delimiters", "_followers")

    def __init__(self, delimiters: Delimiters, followers: Mapping[str, tuple[str, ...]]) -> None:
        self._delimiters = delimiters
        self._followers = followers

    def find(self, text: str, start: int) -> tuple[int, str | None]:
        """The delimiter and where it begins, as `Delimiters.find` has it. Without one: None, and
        where the text ends that is sure to be of the value.
        """
        while True:
            end, delimiter = self._delimiters.find(text, start)
            if delimiter is None:
                return end, None
            counts = self._counts(text, end, delimiter)
            if counts is not False:
                return end, delimiter if counts else None
            start = end + 1

    def is_met(self, text: str) -> bool:
        """Whether text at the end of an output begins with a delimiter."""
        return bool(self._delimiters.at(text, 0))

    def _counts(self, text: str, at: int, delimiter: str) -> bool | None:
        """Whether the delimiter at `at` ends the value; None: what has come does not say."""
        followers = self._followers.get(delimiter)
        if followers is None:
            return True
        after = at + len(delimiter)
        found = NON_BLANK.search(text, after, after + MAX_BLANKS)
        if found is None:
            return None if len(text) < after + MAX_BLANKS else True
        rest = text[found.start() : found.start() + max(map(len, followers))]
        if rest.startswith(followers):
            return True
        is_beginning = any(follower.startswith(rest) for follower in followers)
        return None if is_beginning else False


class ValueReader:
    """The value of an argument, up to the delimiter after it.

    Text is passed on as it comes. Any other type needs the whole value: JSON of that type is passed
    on as written, Python's spelling of it is translated, and what is neither becomes a string.
    `is_padded`: a value that begins with a line end has one at its end, too, and neither is part of
    it. A value that may hold all arguments is not written before it is whole.
    """

    __slots__ = ("_delimiters", "_ends", "_has_begun", "_has_padding", "_is_closed", "_is_padded",
                 "_is_text", "_line_end", "_may_hold_all", "_parameters", "_state", "_text",
                 "_types", "_verbatim")  # fmt: skip

    def __init__(
        self,
        state: ParserState,
        delimiters: Delimiters,
        parameters: Parameters,
        is_padded: bool,
        out: Writer,
    ) -> None:
        self._delimiters = delimiters
        self._ends = ValueEnds(delimiters, state.followers)
        self._state = state
        self._verbatim = state.verbatim
        self._is_closed = False
        self._types = parameters.types(out)
        self._parameters = parameters
        self._may_hold_all = parameters.may_hold_all(out)
        self._is_text = self._types <= {"string"} and not self._may_hold_all
        self._is_padded = is_padded
        self._has_begun = self._has_padding = False
        self._line_end = ""
        self._text: list[str] = []
        if not self._may_hold_all:
            self._write_key(out)

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Read up to a delimiter that is not a part of the value."""
        if self._verbatim is not None:
            opening, closing = self._verbatim
            if len(text) - start < len(opening) and opening.startswith(text[start:]):
                return start, End.MORE
            if text.startswith(opening, start):
                start += len(opening)
                followers = tuple(delimiter.strip(BLANKS) for delimiter in self._state.delimiters)
                self._ends = ValueEnds(Delimiters((closing,)), {closing: followers})
            self._verbatim = None
        end, delimiter = self._ends.find(text, start)
        if self._is_closed:
            return end, delimiter or End.MORE
        self._take(text[start:end], out)
        if delimiter is None:
            return end, End.MORE
        self._close(out)
        if delimiter in self._state.delimiters:
            return end, delimiter
        self._ends, self._is_closed = ValueEnds(self._delimiters, {}), True
        return self.read(text, end + len(delimiter), out)

    def finish(self, rest: str, out: Writer) -> None:
        """A value that was cut short is written as far as it came."""
        if self._is_closed:
            return
        if self._ends.is_met(rest):
            self._close(out)
        elif self._is_text:
            self._pass_on(rest, out)
        else:
            if self._may_hold_all:
                self._write_key(out)
            out.arguments("".join(self._text).strip() + rest)

    def _write_key(self, out: Writer) -> None:
        self._parameters.write_key(out)
        out.arguments(": ")

    def _take(self, text: str, out: Writer) -> None:
        if self._is_text:
            self._pass_on(text, out)
        else:
            self._text.append(text)

    def _pass_on(self, text: str, out: Writer) -> None:
        """Text as a JSON string, without the line ends of the padding."""
        if text and not self._has_begun:
            out.arguments('"')
            self._has_begun = True
            self._has_padding = self._is_padded and text[0] == "\n"
            text = text[1:] if self._has_padding else text
        if not text:
            return
        text, self._line_end = self._line_end + text, ""
        if self._has_padding and text[-1] == "\n":
            # held: only what follows shows whether this line end is the padding
            text, self._line_end = text[:-1], "\n"
        out.arguments(within_quotes(text))

    def _close(self, out: Writer) -> None:
        if self._may_hold_all:
            if self._parameters.write_all("".join(self._text), out):
                return
            self._write_key(out)
        if not self._is_text:
            out.arguments(typed_json("".join(self._text), self._types, self._is_padded))
        else:
            out.arguments('"' if self._has_begun else '""')


def typed_json(text: str, types: frozenset[str], is_padded: bool) -> str:
    """JSON for a value that was written as text, of one of `types` if it can be."""
    value = text.strip(BLANKS)
    others = types - {"string"}
    if fits(json_type(value), others):
        return value
    translated = python_as_json(value)
    if translated is not None and fits(json_type(translated), others):
        return translated
    if value.lower() in ("true", "false", "null") and fits(json_type(value.lower()), others):
        return value.lower()
    if is_padded and text.startswith("\n"):
        text = text[1:].removesuffix("\n")
    return json.dumps(text, ensure_ascii=False)


def fits(kind: str | None, types: frozenset[str]) -> bool:
    """Whether a value has one of the types; integers are numbers, and 1.0 is an integer."""
    return kind in types or (
        kind in ("integer", "number") and not types.isdisjoint({"integer", "number"})
    )
