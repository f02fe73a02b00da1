"""The event loop that a front end runs in: which one, its timers, and what would block it."""

from __future__ import annotations

import asyncio
import atexit
import gc
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The fastest event loop that this platform has."""
    try:
        import uvloop
    except ImportError:  # not available for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def freeze_start_up() -> None:
    """Keep the garbage collector from looking again at what start-up made. For a process that only
    serves, once it is ready.

    A full collection of a front end's 45,000 start-up objects holds up every stream for 20 to
    70 ms.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or native modules (Triton's) report leaks when they go


def while_alive(method: Callable[P, None]) -> Callable[P, None]:
    """Calls a method of an object, which this does not keep alive; later it does nothing."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        own = found()
        if own is not None:
            own(*args, **kwargs)

    return call


class Alarm:
    """Rings once, at the earliest of the times that it was set to, in the running event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0

    def set(self, when: float) -> None:
        """Ring at `when` (of `time.monotonic`) unless it is to ring before."""
        if self._timer is not None:
            if self._when <= when:  # uvloop's handles of times that have come have no when()
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._when = when
        self._timer = loop.call_later(max(0.0, when - time.monotonic()), self._go_off)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()
