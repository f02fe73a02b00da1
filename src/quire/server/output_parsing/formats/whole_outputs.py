"""Whole outputs as structural tags: reasoning as the model likes, then a message in a form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Format = Mapping[str, Any]


def const(text: str) -> Format:
    """A text as it stands."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": [*elements]}


def one_of(elements: Sequence[Format]) -> Format:
    """Any one of them."""
    return {"type": "or", "elements": [*elements]}


def after_thoughts(
    place: str, lasts: Sequence[Format], *, begin: str, end: str, next_message: str
) -> Format:
    """The format of an output from `place` on: reasoning, each between `begin` and `end`, as often
    as the model likes, then one of `lasts`. `next_message` stands between messages.
    """
    last = one_of(lasts)
    thoughts = {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}],
        "separator": next_message,
        "at_least_one": True,
    }
    from_start = one_of([last, sequence(thoughts, const(next_message), last)])
    if place != "reasoning":
        return from_start
    return sequence({"type": "any_text"}, const(end), const(next_message), from_start)
