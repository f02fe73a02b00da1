"""Reads JSON text that ends before its time."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


def readable_part(text: str) -> dict[str, Any] | None:
    """Members that the beginning of an object has in full, inner ones too; None: not an object."""
    complete = 0
    for match in _TOKEN.finditer(text):
        if match.group() in _CLOSERS:
            complete = match.end()
        elif match.group() == ",":
            # before the comma: a member that follows it may be cut
            complete = match.start()
    # the whole first, since its last member may happen to be complete
    for candidate in (_closed(text), _closed(text[:complete])):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue
    return None


def _closed(text: str) -> str:
    """The text with the ends of the objects and lists that are open in it."""
    ends: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _CLOSERS:
            ends.append(_CLOSERS[token])
        elif token in ("]", "}") and ends:
            ends.pop()
    return text + "".join(reversed(ends))
