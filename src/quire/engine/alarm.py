"""A timer of an event loop that can be set again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Alarm:
    """Rings once, at the earliest of the times that it was set to, in the running event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        """Ring at `when` (of `time.monotonic`) unless it is to ring before."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, when - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._go_off)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()
