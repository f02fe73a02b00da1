"""A conversation that responses go on from and are added to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from quire.errors import InvalidParameter

_MAX_ITEMS = 4096


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
        self.is_over = True

    def check_room(self, num_items: int) -> None:
        """Raise InvalidParameter if so many more items are too many."""
        if len(self.items) + num_items > _MAX_ITEMS:
            allowed = f"a conversation has {_MAX_ITEMS} items at most"
            raise InvalidParameter("items", num_items, allowed, "Begin another conversation.")

    def extend(self, items: Iterable[dict[str, Any]]) -> None:
        """Add items at the end; the oldest make room where there is none."""
        self.items += items
        del self.items[:-_MAX_ITEMS]

    def item(self, id: str) -> dict[str, Any] | None:
        """The item with this id."""
        return next((item for item in self.items if item["id"] == id), None)
