"""A response that can be retrieved, followed and continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any

from quire.encodable import to_json
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
        self._event_bytes = 0
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def num_bytes(self) -> int:
        """Bytes of the request, of the response and of the events."""
        # above the bound the events are dropped
        return self._given_bytes + min(self._event_bytes, _MAX_EVENT_BYTES)

    @cached_property
    def _given_bytes(self) -> int:
        return len(to_json([self.response, self.messages, self.input_items]))

    def record(self, event: bytes) -> None:
        """Keep an event; past the bound all are dropped."""
        self._event_bytes += len(event)
        if self._event_bytes > _MAX_EVENT_BYTES:
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
            # taken before the events are looked at: one that comes in between sets it
            news = self._news
            for event in self.events[start:]:
                yield event
                start += 1
            if self.is_cut or (self.is_over and start >= len(self.events)):
                return
            if start >= len(self.events):
                await news.wait()

    def _wake(self) -> None:
        # a new one for each piece of news, so that no follower has to clear what another waits for
        news, self._news = self._news, asyncio.Event()
        news.set()
