"""Python literals to JSON: what models that write calls as Python put in them.

A literal is translated token by token, and what comes out counts if it is JSON. So a value is
passed on as it was written (`1e999`, repeated keys), and nothing nests deeper than Python's JSON
reader allows.
"""

from __future__ import annotations

import codecs
import json
import re

from quire.server.output_parsing.formats.json_value import json_type

MAX_LITERAL_CHARS = 2**20
"""A longer value is no literal."""
MAX_NUMBER_CHARS = 512
"""A longer number is refused, unless JSON has it too."""

STRING = r"""'''(?:[^'\\]|\\.|'(?!''))*+'''|"{3}(?:[^"\\]|\\.|"(?!""))*+"{3}"""
STRING += r"""|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
TOKEN = re.compile(rf"[ \t\r\n]*+(?:({STRING})|([\w.+\-]++)|([\[\](){{}},:]))", re.DOTALL)
ESCAPE = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3]?[0-7]{1,2}|[\n\\'"abfnrtv])"""
)
WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
BRACKETS = {"(": "[", ")": "]"}
"""Tuples become arrays."""
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
DIGITS = r"[0-9](?:_?[0-9])*+"
FLOAT = re.compile(rf"[+-]?(?:{DIGITS}\.?(?:{DIGITS})?|\.{DIGITS})(?:[eE][+-]?[0-9]++)?")


def python_as_json(text: str) -> str | None:
    """A Python literal as JSON text; None for other text, and for what JSON lacks (sets, bytes)."""
    text = text.strip(" \t\r\n")
    if len(text) > MAX_LITERAL_CHARS:
        return None
    written: list[str] = []
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or not _write(found, written):
            return None
        at = found.end()
    translated = "".join(written)
    return None if json_type(translated) is None else translated


def _write(found: re.Match[str], written: list[str]) -> bool:
    """Translate one token; False if JSON has none of its kind."""
    string, word, char = found.groups()
    if (string or word) and written and written[-1] not in ("[", "{", ", ", ": "):
        return False
    if string is not None:
        written.append(_string(string))
    elif word is not None:
        translated = WORDS.get(word) or _number(word)
        if translated is None:
            return False
        written.append(translated)
    elif char in ")]}":
        if written[-1:] == [", "] and written[-2:-1] not in (["["], ["{"]):
            written.pop()  # Python allows a comma after the last item
        written.append(BRACKETS.get(char, char))
    elif char == ":":
        if written and written[-1][-1].isalnum():
            written[-1] = f'"{written[-1]}"'  # keys of JSON are strings
        written.append(": ")
    else:
        written.append(", " if char == "," else BRACKETS.get(char, char))
    return True


def _string(token: str) -> str:
    size = 3 if token[:3] in ("'''", '"""') and len(token) >= 6 else 1
    text = ESCAPE.sub(_character, token[size:-size])
    # Half of a surrogate pair cannot be sent, so it stays an escape.
    return json.dumps(text, ensure_ascii=any("\ud800" <= char <= "\udfff" for char in text))


def _character(found: re.Match[str]) -> str:
    try:
        return codecs.decode(found[0].encode(), "unicode_escape")
    except UnicodeDecodeError:  # beyond the last code point
        return found[0]


def _number(word: str) -> str | None:
    """A number as JSON has it: not `+1`, `1_000`, `0x1F`, `.5` or `5.`."""
    if JSON_NUMBER.fullmatch(word):
        return word
    if len(word) > MAX_NUMBER_CHARS:
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        is_float = FLOAT.fullmatch(word) and not word.strip("+-_").isdecimal()
    return repr(float(word)) if is_float else None
