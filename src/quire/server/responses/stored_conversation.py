"""A conversation that responses go on from and are added to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.errors import InvalidParameter

_MAX_ITEMS = 4096
_MAX_BYTES = 16 * 2**20


class Conversation:
    """One conversation. `items` are those of its responses' inputs and outputs, each with its id.
    `owner` is the digest of the API key that made it, and only this key retrieves it.
    """

    def __init__(self, metadata: dict[str, str], owner: bytes | None) -> None:
        self.id = f"conv_{secrets.token_hex(16)}"
        self.created_at = int(time.time())
        self.metadata = metadata
        self.owner = owner
        self.items: list[dict[str, Any]] = []
        self.num_bytes = 0
        """Of the items, which are what can be large."""
        self.is_over = True

    def check_room(self, items: list[dict[str, Any]]) -> None:
        """Raise InvalidParameter if these are too many to be added, or too large."""
        hint = "Begin another conversation."
        if len(self.items) + len(items) > _MAX_ITEMS:
            allowed = f"a conversation has {_MAX_ITEMS} items at most"
            raise InvalidParameter("items", len(items), allowed, hint)
        if (added := sum(map(_size, items))) + self.num_bytes > _MAX_BYTES:
            allowed = f"a conversation has {_MAX_BYTES} bytes at most"
            raise InvalidParameter("items", f"{added} bytes", allowed, hint)

    def extend(self, items: Iterable[dict[str, Any]]) -> None:
        """Add items at the end; the oldest make room where there is none."""
        for item in items:
            self.items.append(item)
            self.num_bytes += _size(item)
        while len(self.items) > _MAX_ITEMS or self.num_bytes > _MAX_BYTES:
            self.remove(self.items[0])

    def remove(self, item: dict[str, Any]) -> None:
        """Take an item out."""
        self.items.remove(item)
        self.num_bytes -= _size(item)

    def item(self, id: str) -> dict[str, Any] | None:
        """The item with this id."""
        return next((item for item in self.items if item["id"] == id), None)


def _size(item: dict[str, Any]) -> int:
    return len(msgspec.json.encode(item))
