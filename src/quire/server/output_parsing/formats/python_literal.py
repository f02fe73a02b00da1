"""Python literals to JSON: what models that write calls as Python put in them.

A literal is translated token by token, and what comes out counts if it is JSON. So a value is
passed on as it was written (`1e999`, repeated keys), and nothing nests deeper than Python's JSON
decoder allows.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass

from quire.server.output_parsing.delimiters import BLANKS, NON_BLANK
from quire.server.output_parsing.formats.json_value import json_type

MAX_LITERAL_CHARS = 2**20
"""A longer value is not a literal."""
MAX_NUMBER_CHARS = 512
"""A longer number is refused, unless JSON has it too."""
MAX_BLANKS = 256
"""Blanks between a quote and the text that says whether it ends its string."""

QUOTE = re.compile(r"(?:[rbuRBU]|[rR][bB]|[bB][rR])?('''|\"{3}|['\"])")
TOKEN = re.compile(r"([\w.+\-]++)|([\[\](){},:])")
ESCAPE = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3]?[0-7]{1,2}|[\n\\'"abfnrtv])"""
)
IN_STRING = {
    quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ("'", '"', "'" * 3, '"' * 3)
}
AFTER_STRING = re.compile(r"[,:+%*#]|[rbuRBU]{0,2}['\"]")
"""Text that may follow a string in Python, besides brackets; with an operator it is not a literal.
"""
CLOSING = re.compile(r"[)\]}\s]*")
WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
BRACKETS = {"(": "[", ")": "]"}
"""Tuples become arrays."""
PAIRS = {")": "(", "]": "[", "}": "{"}
CLOSERS = {opening: closing for closing, opening in PAIRS.items()}
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
DIGITS = r"[0-9](?:_?[0-9])*+"
FLOAT = re.compile(rf"[+-]?(?:{DIGITS}\.?(?:{DIGITS})?|\.{DIGITS})(?:[eE][+-]?[0-9]++)?")
LEADING_ZEROS = re.compile(r"[+-]?0[0-9_]*")


def python_as_json(text: str) -> str | None:
    """A Python literal as JSON text; None for other text. Sets become arrays, bytes strings."""
    text = text.strip(BLANKS)
    if len(text) > MAX_LITERAL_CHARS:
        return None
    translation = _Translation()
    at, size = 0, len(text)
    text += ","  # what ends the literal ends its last string, too
    while at < size:
        end = translation.token(text, at)
        if end is None:
            return None
        found = NON_BLANK.search(text, end)
        at = size if found is None else found.start()
    translated = "".join(translation.written)
    return None if json_type(translated) is None else translated


def string_end(text: str, start: int, quote: str, closers: str) -> tuple[int, bool]:
    """The end of a string whose inside goes on at `start`, and True. False: its end has not come,
    or the text that shows it to be one; then the index to go on from with more text.

    A quote ends a string where something follows that may stand after one in Python; of brackets,
    those that close what is open (`closers`, the innermost first). So `'it's'`, `"say "hi""` and
    `f(a='g(b='c'))')` mean what was meant.
    """
    while (found := IN_STRING[quote].search(text, start)) is not None:
        start = found.end()
        if found[0][0] == "\\":
            continue
        is_end = True if len(quote) == 3 else _is_end(text, start, quote, closers)
        if is_end is not False:
            return (start, True) if is_end else (found.start(), False)
    held = len(quote) - 1
    if text.endswith("\\") and len(text) > start:
        held = max(held, (len(text) - len(text.rstrip("\\"))) % 2)
    return max(start, len(text) - held), False


def _is_end(text: str, after: int, quote: str, closers: str) -> bool | None:
    """Whether the quote before `after` ends its string; None: what has come does not say."""
    rest = text[after : after + MAX_BLANKS + 4]
    is_cut = len(rest) <= MAX_BLANKS
    if rest[:1] == quote:
        # Two quotes: the second is the end where one can be, else another string follows.
        after_both = rest[1:].lstrip(BLANKS)
        if not after_both and is_cut:
            return None
        is_end = after_both[:1] in (",", ":") or _closes(after_both, closers, is_cut)
        if is_end is not False:
            return None if is_end is None else False
    rest = rest.lstrip(BLANKS)
    if not rest:
        return None if is_cut else True
    if rest[0] in PAIRS:
        return _closes(rest, closers, is_cut)
    if AFTER_STRING.match(rest) is not None:
        return True
    return None if rest[0] in "rbuRBU" and len(rest) < 3 and is_cut else False


def _closes(text: str, closers: str, is_cut: bool) -> bool | None:
    """Whether `text` begins with brackets that close what is open; None: more of it may come."""
    run = CLOSING.match(text)
    assert run is not None, "it may be empty"
    found = "".join(run[0].split())[: len(closers)]
    if not found or not closers.startswith(found):
        return False
    return True if len(found) == len(closers) or run.end() < len(text) or not is_cut else None


@dataclass(slots=True)
class _Bracket:
    """An open bracket: its character, and indexes of its text, last comma and colon."""

    char: str
    index: int
    marks: str = ""


class _Translation:
    """The JSON that was written so far, in pieces, and the brackets that are open."""

    __slots__ = ("_open", "written")

    def __init__(self) -> None:
        self.written: list[str] = []
        self._open: list[_Bracket] = []

    def token(self, text: str, at: int) -> int | None:
        """Translate the token at `at`; where it ends, or None if JSON has none of its kind."""
        quote = QUOTE.match(text, at)
        if quote is not None:
            closers = "".join(CLOSERS[bracket.char] for bracket in reversed(self._open))
            end, is_over = string_end(text, quote.end(), quote[1], closers)
            return self._string(text, at, quote, end) if is_over else None
        found = TOKEN.match(text, at)
        if found is None:
            return None
        word, char = found.groups()
        is_known = self._word(word) if word is not None else self._char(char)
        return found.end() if is_known else None

    def _may_be_value(self) -> bool:
        return not self.written or self.written[-1] in ("[", "{", ", ", ": ")

    def _string(self, text: str, at: int, quote: re.Match[str], end: int) -> int | None:
        body = text[quote.end() : end - len(quote[1])]
        prefix = text[at : quote.start(1)].lower()
        if "r" not in prefix:
            body = ESCAPE.sub(_character, body)
        # Half of a surrogate pair cannot be sent, so it stays an escape.
        value = json.dumps(body, ensure_ascii=any("\ud800" <= char <= "\udfff" for char in body))
        if self.written and self.written[-1].startswith('"'):
            self.written[-1] = self.written[-1][:-1] + value[1:]
        elif self._may_be_value():
            self.written.append(value)
        else:
            return None
        return end

    def _word(self, word: str) -> bool:
        translated = WORDS.get(word) or _number(word)
        if translated is None or not self._may_be_value():
            return False
        self.written.append(translated)
        return True

    def _char(self, char: str) -> bool:
        if char in "([{":
            self._open.append(_Bracket(char, len(self.written)))
            self.written.append(BRACKETS.get(char, char))
            return True
        if char in ")]}":
            return self._close(char)
        if char == ":" and self.written and self.written[-1][-1].isalnum():
            self.written[-1] = f'"{self.written[-1]}"'  # keys of JSON are strings
        if self._open and char not in self._open[-1].marks:
            self._open[-1].marks += char
        self.written.append(": " if char == ":" else ", ")
        return True

    def _close(self, char: str) -> bool:
        if not self._open or self._open[-1].char != PAIRS[char]:
            return False
        bracket = self._open.pop()
        index, marks = bracket.index, bracket.marks
        is_empty = index == len(self.written) - 1
        if self.written[-1] == ", " and index < len(self.written) - 2:
            self.written.pop()  # Python allows a comma after the last item
        if char == ")" and not is_empty and "," not in marks:
            self.written[index] = ""  # a value in parentheses is that value
            return True
        is_set = char == "}" and not is_empty and ":" not in marks
        if is_set:
            self.written[index] = "["
        self.written.append("]" if is_set else BRACKETS.get(char, char))
        return True


def _character(found: re.Match[str]) -> str:
    try:
        return codecs.decode(found[0].encode(), "unicode_escape")
    except UnicodeDecodeError:  # beyond the last code point
        return found[0]


def _number(word: str) -> str | None:
    """A number as JSON has it: not `+1`, `1_000`, `0x1F`, `.5`, `5.` or `007`."""
    if JSON_NUMBER.fullmatch(word):
        return word
    # before int(), whose time grows faster than the length
    if len(word) > MAX_NUMBER_CHARS:
        return None
    try:
        return str(int(word, 10 if LEADING_ZEROS.fullmatch(word) else 0))
    except ValueError:
        is_float = FLOAT.fullmatch(word) and not word.strip("+-_").isdecimal()
    return repr(float(word)) if is_float else None
