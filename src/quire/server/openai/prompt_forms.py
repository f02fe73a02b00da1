"""The forms in which one field of a body holds one prompt or several."""

from __future__ import annotations

from typing import Any

from quire.errors import InvalidParameter


def prompts_in(name: str, given: str | list[Any]) -> list[str | list[int]]:
    """The prompts of the field `name`: a text, a list of texts, a list of ids, or a list of lists
    of ids. Raises InvalidParameter for anything else.
    """
    if isinstance(given, str):
        return [given]
    # type, since bool is a subclass of int and true is not an id
    if given and all(type(item) is int for item in given):
        return [given]
    if not given or not (all(isinstance(item, str) for item in given) or _all_ids(given)):
        raise InvalidParameter(name, given, "it must be a string, token ids, or a list of such")
    return given


def _all_ids(items: list[Any]) -> bool:
    return all(
        isinstance(item, list) and item and all(type(token) is int for token in item)
        for item in items
    )
