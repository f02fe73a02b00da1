"""JSON values in outputs: where one ends in text that arrives in pieces, and the type of a whole
one.

A value that is passed on as it was written is not checked: a model's mistake stays visible.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.server.output_parsing.delimiters import Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.tool_schemas import type_name

STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
SCALAR_END = " \t\r\n,]}"
FIRST_CHARS = '"{[-0123456789tfn'


class JsonValue:
    """The lexer of one value, blanks before it left to the caller.

    A delimiter outside a string ends a value that the model did not finish.
    """

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
        """How far the value goes in this text; a delimiter is given back without being passed."""
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


def json_type(text: str) -> str | None:
    """The type of a JSON text; None for other text."""
    try:
        return type_name(json.loads(text, parse_int=_an_integer, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _an_integer(digits: str) -> int:
    """Which integer does not matter, and Python refuses to read very long ones."""
    return 0


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
