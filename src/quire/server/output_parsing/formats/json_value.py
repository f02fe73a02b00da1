"""JSON values in outputs: where one ends in text that arrives in pieces, and the type of a whole
one.

A value that is passed on as it was written is not checked: a model's mistake stays visible.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.server.output_parsing.delimiters import BLANKS, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.json_string import JsonString
from quire.server.output_parsing.tool_schemas import type_name

STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
SCALAR_END = " \t\r\n,]}"
FIRST_CHARS = '"{[-0123456789tfn'
MAX_BLANKS = 64
"""Blanks before an object in a string; more are the string's own."""
OBJECT_IN_STRING = re.compile(
    rf"""[^"]                             # not a string
    |"(?:[ ]|\\[nrt]){{0,{MAX_BLANKS}}}+(?:({{)|[^ \\{{]|\\[^nrt])
    |".{{{2 * MAX_BLANKS + 2}}}           # too many blanks""",
    re.DOTALL | re.VERBOSE,
)
"""The beginning of a value that shows whether it is a string of an object: group 1 if it is."""


class JsonValue:
    """The lexer of a value after blanks; a delimiter outside a string ends an unfinished one."""

    __slots__ = (
        "_between",
        "_depth",
        "_in_scalar",
        "_in_string",
        "_is_escaped",
        "_delimiters",
        "_plain",
    )

    def __init__(self, delimiters: Delimiters) -> None:
        self._delimiters = delimiters
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._in_scalar = False
        self._between = re.compile(rf'[^"{{}}\[\]{re.escape(delimiters.first_chars)}]*+')
        self._plain = re.compile(rf"[^{re.escape(SCALAR_END + delimiters.first_chars)}]*+")

    def read(self, text: str, start: int) -> tuple[int, Outcome]:
        """End of the value in this text; a delimiter is given back without being passed."""
        outcome: Outcome | None = None
        while outcome is None and start < len(text):
            if self._in_string:
                start, outcome = self._read_string(text, start)
            else:
                start, outcome = self._read_outside(text, start)
        return start, outcome or End.MORE

    def _read_string(self, text: str, start: int) -> tuple[int, Outcome | None]:
        if self._is_escaped:
            self._is_escaped = False
            return start + 1, None
        found = STRING.match(text, start)
        start = found.end() if found else start
        if start == len(text):
            return start, None
        self._is_escaped = text[start] == "\\"
        self._in_string = self._is_escaped
        return start + 1, None if self._in_string or self._depth else End.DONE

    def _read_outside(self, text: str, start: int) -> tuple[int, Outcome | None]:
        if self._in_scalar or self._depth:
            found = (self._plain if self._in_scalar else self._between).match(text, start)
            start = found.end() if found else start
            if start == len(text):
                return start, None
        char = text[start]
        if (
            char in self._delimiters.first_chars
            and (delimiter := self._delimiters.at(text, start)) is not None
        ):
            return start, delimiter or End.MORE
        return self._read_structure(char, start)

    def _read_structure(self, char: str, start: int) -> tuple[int, Outcome | None]:
        if self._in_scalar:
            # only what follows a number shows that it has ended
            return (start, End.DONE) if char in SCALAR_END else (start + 1, None)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            if not self._depth:
                return start + 1, End.DONE
        elif not self._depth:
            self._in_scalar = True
            return start, None if char not in SCALAR_END else End.DONE
        return start + 1, None


class ObjectInString:
    """Arguments that some models write as a string of JSON: `"{\\"a\\": 1}"` is the object.

    It is fed the value as it was written, and gives what to pass on: the text of the object where
    the value is a string of one, else the value as it stands.
    """

    __slots__ = ("_early", "_passes", "_string")

    def __init__(self) -> None:
        self._string: JsonString | None = JsonString()
        self._early = ""
        self._passes = False

    def read(self, text: str) -> str:
        """The text that the next piece adds."""
        if self._passes:
            return text if self._string is None else self._string.read(text)
        self._early += text
        found = OBJECT_IN_STRING.match(self._early)
        if found is None:
            return ""
        early, self._early, self._passes = self._early, "", True
        if found[1] is None:
            self._string = None
            return early
        assert self._string is not None
        return self._string.read(early[1:]).lstrip(BLANKS)

    def finish(self) -> str:
        """The rest, when the value has ended or will not end."""
        return self._early if self._string is None or not self._passes else self._string.finish()


def json_type(text: str) -> str | None:
    """The type of a JSON text; None for other text."""
    try:
        return type_name(json.loads(text, parse_int=_an_integer, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _an_integer(digits: str) -> int:
    """Some integer: its value does not matter, and Python refuses to read very long ones."""
    return 0


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
