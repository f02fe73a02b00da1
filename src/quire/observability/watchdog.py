"""Watches a loop: when one turn takes too long, the stacks of all threads are logged."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
import traceback

logger = logging.getLogger(__name__)


def thread_stacks() -> str:
    """The stack of every thread of this process, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {names.get(ident, 'unknown')} ({ident}):\n{stack}")
    return "\n".join(parts)


class Watchdog:
    """Gets the age of a loop's turn periodically, from another thread.

    It logs an error when the age exceeds `limit_s`, and again whenever it has doubled. Where native
    code keeps even that thread from running for `silence_s`, the interpreter's own watchdog writes
    the stacks to standard error (a process has only one; None: it is not used).
    """

    def __init__(self, what: str, limit_s: float, *, silence_s: float | None = None) -> None:
        self._what = what
        self._limit_s = limit_s
        self._next_s = limit_s
        self._silence_s = silence_s

    def look(self, age_s: float) -> bool:
        """Take the age of the present turn (0: the loop waits). Whether an error was logged."""
        if self._silence_s is not None and sys.__stderr__ is not None:
            # set again at each look: it fires only where looks stop coming
            faulthandler.dump_traceback_later(self._silence_s, file=sys.__stderr__)
        if age_s < self._limit_s:
            self._next_s = self._limit_s
        if age_s < self._next_s:
            return False
        # one long hang must not fill the log
        self._next_s = 2 * age_s
        logger.error("%s has been stuck for %.1f s:\n%s", self._what, age_s, thread_stacks())
        return True

    def close(self) -> None:
        """Stop the interpreter's own watchdog."""
        if self._silence_s is not None:
            faulthandler.cancel_dump_traceback_later()


class LoopWatch:
    """A thread that watches an event loop from `start` to `close`.

    The loop records the time every `period_s`; while the loop is not running that is not expected.
    """

    def __init__(self, watchdog: Watchdog, period_s: float = 1.0) -> None:
        self._watchdog = watchdog
        self._period_s = period_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sign = 0.0
        self._is_over = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leave_sign()
        # a daemon: it must not keep the process from its exit
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def close(self) -> None:
        """Stop; the thread ends by itself."""
        self._is_over.set()
        if self._timer is not None:
            self._timer.cancel()

    def _leave_sign(self) -> None:
        assert self._loop is not None
        self._sign = time.monotonic()
        self._timer = self._loop.call_later(self._period_s, self._leave_sign)

    def _watch(self) -> None:
        assert self._loop is not None
        while not self._is_over.wait(self._period_s) and not self._loop.is_closed():
            late_s = time.monotonic() - self._sign - self._period_s
            self._watchdog.look(max(0.0, late_s) if self._loop.is_running() else 0.0)
