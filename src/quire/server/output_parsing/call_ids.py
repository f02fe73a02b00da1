"""Ids of tool calls. They are random, so that no client can guess or mix up another's."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

CallId = Callable[[str, int], str]
"""(name, index of the call in its output) -> id."""

ALPHABET = string.ascii_letters + string.digits
SHORT_ID_CHARS = 9


def plain_call_id(name: str, index: int) -> str:
    """The form of most formats: 128 random bits."""
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def short_call_id(name: str, index: int) -> str:
    """Mistral's form; its chat templates refuse any other."""
    return "".join(secrets.choice(ALPHABET) for _ in range(SHORT_ID_CHARS))


def counted_call_id(name: str, index: int) -> str:
    """Kimi's form, which says which call of the output it is."""
    return f"functions.{name}:{index}"
