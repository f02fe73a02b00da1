"""The event loop that a front end runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The fastest event loop that this platform has."""
    try:
        import uvloop
    except ImportError:  # there is none for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop
