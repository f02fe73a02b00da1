"""Regular expressions with Python's meaning, rewritten for the engine that makes masks of them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import EngineError

_CLASSES = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "W": r"[^\w\p{N}]",
    "S": r"[^\s\x1c-\x1f]",
}
"""Classes of characters, each a part of what Python means by it, so that an output matches there
too: the two disagree about rare characters only, and those are left out.
"""

_SPECIAL = frozenset(r"\.+*?()|[]{}^$/-#&~")


class PatternError(EngineError):
    """A regular expression is invalid; the text says why."""


def check_escapes(pattern: str) -> None:
    """Raise PatternError where the last escape lacks its character: llguidance drops the backslash,
    and between slashes it would escape the one that ends the pattern.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise PatternError("the pattern ends in the middle of an escape: write two for a backslash")


def narrowed(pattern: str) -> str:
    """`pattern` with its character classes in terms that all engines agree on. Python has no sets
    within sets: there `[`, `&` and `~` are characters. Raises PatternError for an escape without
    its character.
    """
    check_escapes(pattern)
    parts, escaped = [], False
    set_began: int | None = None  # where the first character of the set is, which may be `]`
    for at, char in enumerate(pattern):
        if escaped:
            parts.append(_CLASSES.get(char, "\\" + char))
            escaped = False
        elif char == "\\":
            escaped = True
        elif set_began is None:
            parts.append(char)
            if char == "[":
                set_began = at + (2 if pattern[at + 1 : at + 2] == "^" else 1)
        else:
            parts.append("\\" + char if char in "[&~" else char)
            if char == "]" and at > set_began:
                set_began = None
    return "".join(parts)


def terminal(pattern: str) -> str:
    """A pattern between slashes, as in Lark's notation: the slashes in it are escaped."""
    text, is_escaped = [], False
    for char in pattern:
        # a line end would end the rule
        text.append("\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(text)}/"


def one_of(texts: Iterable[str]) -> str:
    """A pattern for exactly these texts."""
    return "(" + "|".join(map(escaped, texts)) + ")"


def escaped(text: str) -> str:
    """A pattern for exactly this text."""
    return "".join("\\" + c if c in _SPECIAL else "\\n" if c == "\n" else c for c in text)
