"""What commands that serve share: their log, and the event loop that they run in."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable


def start_logging(level: str) -> None:
    """Log to standard error from `level` on."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The fastest event loop that this platform has."""
    try:
        import uvloop
    except ImportError:  # there is none for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop
