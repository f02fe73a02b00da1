"""Responses that can be retrieved: a bounded number, the latest."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from quire.errors import CapacityError
from quire.server.responses.replies import ResponseObject

_MAX_EVENT_BYTES = 4 * 2**20
"""Events of one response that are kept for clients that follow it later."""


class StoredResponse:
    """One response with what is needed to go on from it, and its events for those who follow.

    `input_items` are those of its request. `owner` is the digest of the API key that made it, and
    only this key retrieves it.
    """

    def __init__(
        self,
        response: ResponseObject,
        messages: list[dict[str, Any]],
        owner: bytes | None,
        input_items: list[dict[str, Any]],
    ) -> None:
        self.response = response
        self.input_items = input_items
        self.messages = messages
        self.owner = owner
        self.events: list[bytes] = []
        self.is_cut = False
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self._num_bytes = 0
        self._news = asyncio.Event()

    def record(self, event: bytes) -> None:
        """Keep an event; past the bound all are dropped."""
        self._num_bytes += len(event)
        if self._num_bytes > _MAX_EVENT_BYTES:
            self.is_cut = True
            self.events.clear()
        if not self.is_cut:
            self.events.append(event)
        self._wake()

    def end(self) -> None:
        """No event follows."""
        self.is_over = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from number `start` on, to the last."""
        while True:
            news = self._news
            for event in self.events[start:]:
                yield event
                start += 1
            if self.is_cut or (self.is_over and start >= len(self.events)):
                return
            if start >= len(self.events):
                await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class ResponseStore:
    """At most `limit` responses, the oldest of which make room; one that is being made stays."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether anything is kept at all."""
        return self._limit > 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response. Raises CapacityError when all that are kept are still being made."""
        while len(self._responses) >= self._limit:
            oldest = next((k for k, r in self._responses.items() if r.is_over), None)
            if oldest is None:
                raise CapacityError("Too many responses are being made.", retry_after_s=1.0)
            del self._responses[oldest]
        self._responses[stored.response.id] = stored

    def get(self, id: str, owner: bytes | None) -> StoredResponse | None:
        """The response, if it is kept and the owner's."""
        stored = self._responses.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def remove(self, id: str) -> None:
        """Keep it no longer; unknown ones are passed over."""
        self._responses.pop(id, None)
