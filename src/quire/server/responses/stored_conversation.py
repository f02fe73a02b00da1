"""A conversation that responses go on from and are added to."""

from __future__ import annotations

import secrets
import time
from typing import Any

from quire.encodable import to_json
from quire.server.http.failures import Refusal

_MAX_ITEMS = 4096
_MAX_BYTES = 16 * 2**20


class Conversation:
    """One conversation. `items` are those of its responses' inputs and outputs, each with its id.
    `owner` is the digest of the API key that made it, and only this key retrieves it.

    What is added to it stays: at its bounds (`most_bytes`, or the bound of every conversation)
    nothing more is taken. Only the response that reaches them goes past, with its output.
    """

    def __init__(
        self, metadata: dict[str, str], owner: bytes | None, most_bytes: int = _MAX_BYTES
    ) -> None:
        self.id = f"conv_{secrets.token_hex(16)}"
        self.created_at = int(time.time())
        self.metadata = metadata
        self.owner = owner
        self.items: list[dict[str, Any]] = []
        self.num_bytes = 0
        """Bytes of the items, which are the part that can be large."""
        self.is_over = True
        self._most_bytes = min(most_bytes, _MAX_BYTES)

    def check_room(self, items: list[dict[str, Any]]) -> None:
        """Raise Refusal (413) if these are too many to be added, or too large."""
        num, size = len(self.items) + len(items), self.num_bytes + sum(map(_size, items))
        for found, most, unit in ((num, _MAX_ITEMS, "items"), (size, self._most_bytes, "bytes")):
            if found > most:
                raise Refusal(
                    413,
                    f"The conversation would have {found} {unit}, and may have {most} (see "
                    "--max-stored-bytes). It stays as it is: delete items, or begin another one.",
                    param="conversation",
                )

    def extend(self, items: list[dict[str, Any]]) -> bool:
        """Add items at the end. False, and nothing is added, where there is no room left at all, as
        when other responses have reached the bounds meanwhile.
        """
        if len(self.items) >= _MAX_ITEMS or self.num_bytes >= self._most_bytes:
            return False
        self.items += items
        self.num_bytes += sum(map(_size, items))
        return True

    def remove(self, item: dict[str, Any]) -> None:
        self.items.remove(item)
        self.num_bytes -= _size(item)

    def item(self, id: str) -> dict[str, Any] | None:
        return next((item for item in self.items if item["id"] == id), None)


def _size(item: dict[str, Any]) -> int:
    return len(to_json(item))
