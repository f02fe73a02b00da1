"""JSON strings in pieces: the text that one means, and a text as a piece of one."""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r'[^"\\]*+')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_OTHER_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_CHARS = len("\\ud83d")
_MOST_ESCAPE = 2 * _HALF_CHARS


def within_quotes(text: str) -> str:
    """A text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonString:
    """Reads a string after its opening quote. `is_over`: its closing quote has come.

    For every way of cutting the string into pieces the texts add up to the same. An escape that
    JSON does not have is text as it stands.
    """

    __slots__ = ("_held", "is_over")

    def __init__(self) -> None:
        self._held = ""
        self.is_over = False

    def read(self, text: str) -> str:
        """The text that a piece adds; half of an escape is held, text after the end left out."""
        text, self._held = self._held + text, ""
        pieces, at = [], 0
        while at < len(text) and not self.is_over:
            plain = _PLAIN.match(text, at)
            assert plain is not None, "it matches nothing too"
            pieces.append(plain[0])
            at = plain.end()
            if text.startswith('"', at):
                self.is_over = True
            elif at < len(text):
                at, piece = self._escape(text, at)
                pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """The text that is held, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _escape(self, text: str, at: int) -> tuple[int, str]:
        """The character that an escape means, and where it ends; it is held until it is whole."""
        rest = text[at : at + _MOST_ESCAPE]
        is_half = _HALF.match(rest) is not None
        is_open = not _is_lone(rest) if is_half else _may_become_one(rest)
        if is_open and len(rest) < _MOST_ESCAPE:
            self._held = text[at:]
            return len(text), ""
        # both at once, since half of a surrogate pair is not a character (RFC 8259, 7)
        if is_half and _OTHER_HALF.match(rest, _HALF_CHARS):
            return at + _MOST_ESCAPE, json.loads(f'"{rest}"')
        found = _ESCAPE.match(rest)
        if found is None:
            return at + 1, "\\"
        char = json.loads(f'"{found[0]}"')
        # a lone half cannot be encoded as UTF-8
        return at + found.end(), "\ufffd" if "\ud800" <= char <= "\udfff" else char


def _may_become_one(rest: str) -> bool:
    """Whether text from a backslash on is the beginning of an escape and not a whole one."""
    return re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", rest) is not None


def _is_lone(rest: str) -> bool:
    """Whether the half of a character at the start cannot be followed by its other half."""
    other = rest[_HALF_CHARS:]
    return re.fullmatch(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,2})?)?)?)?", other) is None
