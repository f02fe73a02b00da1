"""The lives of a fleet's processes: each is restarted when it ends, all are stopped together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from quire.processes.child_process import ChildProcess, is_shortage
from quire.server.http.listening import ShutdownSignal

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=ChildProcess)

SILENT_S = 30.0
"""A server without a heartbeat for longer is killed."""
CHECK_INTERVAL_S = 1.0
LONG_LIFE_S = 30.0
MAX_SHORT_LIVES = 5
"""Processes that may die in a row before they served for `LONG_LIFE_S`."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
GRACE_S = 10.0
"""Time that servers have to exit, in addition to that of their requests, in seconds."""


async def keep_alive(
    title: str,
    process: P,
    ending: ShutdownSignal,
    *,
    live: Callable[[P], Awaitable[None]],
    on_death: Callable[[], None],
    again: Callable[[], P],
    start: Callable[[P], None],
) -> None:
    """Restart a process each time that it dies, until all stop or it has died too often.

    `live` returns when the process has ended, `on_death` notes that. `again` makes the next one,
    and `start` sends it its message. Both may block, and may want for descriptors or memory.
    """
    num_short_lives = 0
    while True:
        began = time.monotonic()
        await live(process)
        exit_status = await asyncio.to_thread(process.exit_words)
        on_death()
        if ending.begun.is_set():
            return
        is_long = time.monotonic() - began > LONG_LIFE_S
        num_short_lives = 0 if is_long else num_short_lives + 1
        if num_short_lives >= MAX_SHORT_LIVES:
            logger.error("%s %s repeatedly: shutting down.", title, exit_status)
            ending.fail()
            return
        logger.error("%s %s; restarting it.", title, exit_status)
        if num_short_lives > 1:
            # at once the first time: most deaths are single ones
            pause_s = FIRST_PAUSE_S * 2 ** (num_short_lives - 1)
            await asyncio.sleep(min(LONGEST_PAUSE_S, pause_s))
            if ending.begun.is_set():
                return
        process = await _restarted(title, again)
        await asyncio.to_thread(start, process)


async def _restarted(title: str, again: Callable[[], P]) -> P:
    """A new process, as soon as there are descriptors and memory for it."""
    while True:
        try:
            return again()
        except OSError as error:
            if not is_shortage(error):
                raise
            logger.error("%s cannot be restarted now: %s", title, error)
            await asyncio.sleep(LONGEST_PAUSE_S)


async def stop_all(
    ending: ShutdownSignal,
    keepers: Sequence[asyncio.Future[None]],
    processes: Callable[[], Iterable[ChildProcess]],
    shut_down: Callable[[], None],
    drain_s: float,
) -> None:
    """Stop all servers. `shut_down` has them drain their requests, or, when it is called again, at
    a second signal or when their time is over, abort them; a server that does not exit is killed.
    """
    logger.info(
        "Shutting down: refusing new requests, draining running ones for up to %.0f s.", drain_s
    )
    shut_down()
    hurried = asyncio.ensure_future(ending.hurried.wait())
    gone = asyncio.ensure_future(asyncio.wait(keepers))
    await _first_of(gone, hurried, timeout_s=drain_s + GRACE_S)
    hurried.cancel()
    if not gone.done():
        shut_down()
        await _first_of(gone, timeout_s=GRACE_S)
    for process in processes():
        if process.is_running:
            logger.error("A server did not exit in time: killing it.")
            await asyncio.to_thread(process.kill)


async def _first_of(*waits: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait for one of them; none is cancelled."""
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
