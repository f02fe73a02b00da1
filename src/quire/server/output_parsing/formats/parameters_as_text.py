"""Arguments that a format writes one by one, as text: they become JSON by the tool's schema."""

from __future__ import annotations

import json

from quire.server.output_parsing.delimiters import BLANKS, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.json_value import json_type
from quire.server.output_parsing.formats.python_literal import python_as_json
from quire.server.output_parsing.stream_writer import Writer
from quire.server.output_parsing.tool_schemas import ToolSchemas


class Parameters:
    """The arguments of the call that is being read. `key` is that of the next value."""

    __slots__ = ("_is_open", "_schemas", "key")

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self.key = ""
        self._is_open = False

    def start(self) -> None:
        """A new call: nothing is written yet."""
        self._is_open = False

    def write_key(self, out: Writer) -> None:
        """Write the key, as far as it is known."""
        out.arguments(", " if self._is_open else "{")
        out.arguments(json.dumps(self.key, ensure_ascii=False))
        self._is_open = True

    def types(self, out: Writer) -> frozenset[str]:
        """The types that the value of the last key may have."""
        return self._schemas.types(out.call_name, self.key)

    def close(self, out: Writer) -> None:
        """The call is complete."""
        out.arguments("}" if self._is_open else "{}")


class KeyReader:
    """The name of an argument, up to the delimiter after it."""

    __slots__ = ("_delimiters", "_parameters", "_text")

    def __init__(self, delimiters: Delimiters, parameters: Parameters) -> None:
        self._delimiters = delimiters
        self._parameters = parameters
        self._text: list[str] = []

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """The key is written with its value."""
        end, delimiter = self._delimiters.find(text, start)
        self._text.append(text[start:end])
        if delimiter is None:
            return end, End.MORE
        self._parameters.key = "".join(self._text).strip()
        return end, delimiter

    def finish(self, rest: str, out: Writer) -> None:
        """A key that was cut short is written as far as it came."""
        self._parameters.key = "".join(self._text).strip() + rest
        self._parameters.write_key(out)


class ValueReader:
    """The value of an argument, up to the delimiter after it.

    Text is passed on as it comes. Any other type needs the whole value: JSON of that type is passed
    on as written, Python's spelling of it is translated, and what is neither becomes a string.
    `is_padded`: the value stands on lines of its own, whose ends are not part of it.
    """

    __slots__ = (
        "_has_begun",
        "_is_padded",
        "_is_text",
        "_line_end",
        "_delimiters",
        "_text",
        "_types",
    )

    def __init__(
        self, delimiters: Delimiters, parameters: Parameters, is_padded: bool, out: Writer
    ) -> None:
        self._delimiters = delimiters
        self._types = parameters.types(out)
        self._is_text = self._types <= {"string"}
        self._is_padded = is_padded
        self._has_begun = False
        self._line_end = ""
        self._text: list[str] = []
        parameters.write_key(out)
        out.arguments(": ")

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """A delimiter within the value ends it: these formats have no way to write it otherwise."""
        end, delimiter = self._delimiters.find(text, start)
        if self._is_text:
            self._pass_on(text[start:end], out)
        else:
            self._text.append(text[start:end])
        if delimiter is None:
            return end, End.MORE
        self._close(out)
        return end, delimiter

    def finish(self, rest: str, out: Writer) -> None:
        """A value that was cut short is written as far as it came."""
        if self._is_text:
            self._pass_on(rest, out)
        else:
            out.arguments("".join(self._text).strip() + rest)

    def _pass_on(self, text: str, out: Writer) -> None:
        """Text as a JSON string, without the line ends of the padding."""
        if text and not self._has_begun:
            out.arguments('"')
            self._has_begun = True
            text = text[1:] if self._is_padded and text[0] == "\n" else text
        if not text:
            return
        text, self._line_end = self._line_end + text, ""
        if self._is_padded and text[-1] == "\n":
            text, self._line_end = text[:-1], "\n"
        out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _close(self, out: Writer) -> None:
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
    if is_padded:
        text = text.removeprefix("\n").removesuffix("\n")
    return json.dumps(text, ensure_ascii=False)


def fits(kind: str | None, types: frozenset[str]) -> bool:
    """Whether a value of this JSON type is one of the types; an integer is a number, and so is one
    that is written as 1.0 an integer.
    """
    return kind in types or (
        kind in ("integer", "number") and not types.isdisjoint({"integer", "number"})
    )
