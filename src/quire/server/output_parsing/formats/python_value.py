"""Python literals to JSON, piece by piece: what models that write calls as Python put in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.server.output_parsing.delimiters import NON_BLANK
from quire.server.output_parsing.ends import End

WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
    "null": "null",
}  # fmt: skip
WORD = re.compile(r"[\w.+\-]*+")
# What json.dumps would write as Infinity does not count: "1e999" stays as it is written.
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
PYTHON_NUMBER = re.compile(r"([+-]?)([0-9_]*+)(?:\.([0-9_]*+))?(?:[eE]([+-]?[0-9]++))?")
BASE_NUMBER = re.compile(r"-?0(?:[xX][0-9a-fA-F]++|[oO][0-7]++|[bB][01]++)")
MAX_NUMBER_CHARS = 512
CLOSERS = {"[": "]", "(": ")", "{": "}"}
SIMPLE_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b",
    "f": "\f", "v": "\v", "\n": "",
}  # fmt: skip
CODE_ESCAPE_DIGITS = {"x": 2, "u": 4, "U": 8}
ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))", re.ASCII
)


class PythonValue:
    """One literal, read once and written as JSON to `emit`.

    Tuples become arrays, and a string may go over several lines. What no JSON has (sets, bytes,
    names, expressions) is a MISFIT at the place where it shows. Time is linear in the text, memory
    in the depth.
    """

    __slots__ = ("_comma", "_emit", "_expects", "_quote", "_stack", "_word")

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._stack: list[str] = []
        self._expects = "value"  # or "key", "colon", "comma"
        self._comma = ""
        self._quote = ""
        self._word: list[str] = []

    def read(self, text: str, start: int) -> tuple[int, End]:
        """How far the literal goes, and whether it is complete."""
        end: End | None = None
        while end is None:
            if self._quote:
                start, end = self._read_string(text, start)
            elif self._word:
                start, end = self._read_word(text, start)
            else:
                found = NON_BLANK.search(text, start)
                if found is None:
                    return len(text), End.MORE
                start, end = self._read_structure(text, found.start())
        return start, end

    def finish(self, rest: str) -> None:
        """The output ended within the literal: what was read is written, and nothing closed."""
        if self._word:
            self._before_item()
            self._emit("".join(self._word))
        elif self._quote:
            self._emit(_escaped(rest))

    def _read_structure(self, text: str, start: int) -> tuple[int, End | None]:
        char = text[start]
        if char in "'\"" and self._expects in ("value", "key"):
            return self._open_string(text, start)
        if char in CLOSERS and self._expects == "value":
            self._before_item()
            self._emit("{" if char == "{" else "[")
            self._stack.append(char)
            self._expects = "key" if char == "{" else "value"
            return start + 1, None
        if self._stack and char == CLOSERS[self._stack[-1]] and self._may_close():
            self._comma, self._expects = "", "value"
            self._emit("}" if self._stack.pop() == "{" else "]")
            return start + 1, self._after_item()
        if char in ",:" and self._expects == {",": "comma", ":": "colon"}[char]:
            self._separate(char)
            return start + 1, None
        if self._expects in ("value", "key") and (char.isalnum() or char in "+-._"):
            self._word.append(char)
            return start + 1, None
        return start, End.MISFIT

    def _may_close(self) -> bool:
        """After an item, or where one could begin: `[`, `[1,` and `{` but not `{"a":`."""
        in_object = self._stack[-1] == "{"
        return self._expects == "comma" or self._expects == ("key" if in_object else "value")

    def _separate(self, char: str) -> None:
        if char == ":":
            self._emit(": ")
            self._expects = "value"
        else:
            self._comma = ", "
            self._expects = "key" if self._stack[-1] == "{" else "value"

    def _before_item(self) -> None:
        """The comma before an item is written with the item: Python allows one after the last."""
        if self._comma:
            self._emit(self._comma)
            self._comma = ""

    def _after_item(self) -> End | None:
        self._expects = "colon" if self._expects == "key" else "comma"
        return None if self._stack or self._expects == "colon" else End.DONE

    def _read_word(self, text: str, start: int) -> tuple[int, End | None]:
        found = WORD.match(text, start)
        end = found.end() if found else start
        self._word.append(text[start:end])
        if end == len(text):
            return end, End.MORE
        word = _word_as_json("".join(self._word))
        if word is None:
            self.finish("")  # already taken, so it stays with the arguments
            self._word.clear()
            return end, End.MISFIT
        self._word.clear()
        self._before_item()
        self._emit(f'"{word}"' if self._expects == "key" else word)
        return end, self._after_item()

    def _open_string(self, text: str, start: int) -> tuple[int, End | None]:
        quote = text[start]
        opening = text[start : start + 3]
        if opening in (quote, quote * 2):
            return start, End.MORE  # empty, or the beginning of three quotes
        self._quote = quote * 3 if opening == quote * 3 else quote
        self._before_item()
        self._emit('"')
        return start + len(self._quote), None

    def _read_string(self, text: str, start: int) -> tuple[int, End | None]:
        plain = PLAIN[self._quote].match(text, start)
        end = plain.end() if plain else start
        if end > start:
            self._emit(_escaped(text[start:end]))
        if end == len(text):
            return end, End.MORE
        if text[end] == "\\":
            return self._read_escape(text, end)
        return self._read_quote(text, end)

    def _read_quote(self, text: str, start: int) -> tuple[int, End | None]:
        if text.startswith(self._quote, start):
            length, self._quote = len(self._quote), ""
            self._emit('"')
            return start + length, self._after_item()
        if self._quote.startswith(text[start : start + 3]) and len(text) < start + 3:
            return start, End.MORE
        self._emit(_escaped(text[start]))
        return start + 1, None

    def _read_escape(self, text: str, start: int) -> tuple[int, End | None]:
        char = text[start + 1 : start + 2]
        size = 4 if char.isdigit() else 2 + CODE_ESCAPE_DIGITS.get(char, 0)
        if not char or len(text) < start + size:
            return start, End.MORE
        if char in SIMPLE_ESCAPES:
            self._emit(_escaped(SIMPLE_ESCAPES[char]))
            return start + 2, None
        found = ESCAPE.match(text, start)
        if found is None:
            self._emit(_escaped(text[start : start + 2]))
            return start + 2, None
        self._emit(_code_escape(found))
        return found.end(), None


# Text of a string that ends at this quote, up to what needs a look.
PLAIN = {
    "'": re.compile(r"[^'\\]*+"),
    '"': re.compile(r'[^"\\]*+'),
    "'''": re.compile(r"[^'\\]*+"),
    '"""': re.compile(r'[^"\\]*+'),
}


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _code_escape(found: re.Match[str]) -> str:
    """A numbered character as it stands in a JSON string; half a surrogate pair stays escaped."""
    digits, base = (found[4], 8) if found[4] else (found[1] or found[2] or found[3], 16)
    code = int(digits, base)
    if code > 0x10FFFF:
        return _escaped(found.group())
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else _escaped(chr(code))


def _word_as_json(word: str) -> str | None:
    if word in WORDS:
        return WORDS[word]
    if len(word) > MAX_NUMBER_CHARS:
        return None
    if JSON_NUMBER.fullmatch(word):
        return word
    if BASE_NUMBER.fullmatch(word):
        return str(int(word, 0))
    found = PYTHON_NUMBER.fullmatch(word)
    return _python_number(found) if found else None


def _python_number(found: re.Match[str]) -> str | None:
    """`+1`, `1_000`, `.5` and `5.`, none of which JSON has."""
    sign, digits, fraction, exponent = found.groups()
    digits, is_whole = digits.replace("_", ""), fraction is None
    fraction = (fraction or "").replace("_", "")
    if not (digits or fraction) or (is_whole and exponent is None and digits.startswith("0")):
        return None
    number = f"{sign.strip('+')}{digits.lstrip('0') or '0'}"
    number += "" if is_whole else f".{fraction or '0'}"
    return number if exponent is None else f"{number}e{exponent}"
