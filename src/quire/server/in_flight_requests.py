"""What is going through the server now: how many requests, which of them are in the engine, and
whether new ones are still welcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from quire.engine.frontend.admission import Neighbours


class InFlightRequests:
    """Counts and names of requests in progress; belongs to one event loop.

    `is_draining`: the server is about to stop, so that `/ready` says no. `neighbours` are other
    processes that serve the same.
    """

    def __init__(self, neighbours: Neighbours | None = None) -> None:
        self._neighbours = neighbours or Neighbours()
        self.num_requests = 0
        self.is_draining = False
        self._keys: dict[str, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more request while the block runs."""
        self._count(1)
        self._idle.clear()
        try:
            yield
        finally:
            self._count(-1)
            if not self.num_requests:
                self._idle.set()

    @property
    def num_everywhere(self) -> int:
        """The requests in progress here and at the neighbours."""
        return self.num_requests + int(self._neighbours.load().num_answered)

    def _count(self, change: int) -> None:
        self.num_requests += change
        self._neighbours.tell(num_answered=self.num_requests)

    async def wait_until_idle(self) -> None:
        """Return when no request is in progress."""
        await self._idle.wait()

    def enter(self, key: str, shown: str) -> None:
        """The engine works for `key`, which clients know as `shown`."""
        self._keys[key] = shown

    def leave(self, key: str) -> None:
        """The engine has done with `key`; more than once is fine."""
        self._keys.pop(key, None)

    def keys(self, shown: Collection[str] | None = None) -> list[str]:
        """The engine's names of the requests that clients know by these (None: of all)."""
        return [key for key, name in self._keys.items() if shown is None or name in shown]
