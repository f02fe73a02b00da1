"""SIGTERM and SIGINT while a server starts: they end it in order, as they end one that serves."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from quire.processes.owner_signals import OWNER_SIGNALS


class StoppedWhileStarting(SystemExit):
    """A signal came before the server took signals itself."""


class StartSignals:
    """Raises StoppedWhileStarting when a signal comes, and at the next `check` as well: where the
    exception is raised, in an import for example, it may be swallowed.
    """

    def __init__(self) -> None:
        self._has_come = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the signals in the block, until another handler replaces this one."""
        # only the main thread may set handlers
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler, self._has_come = self._on_signal, False
        before = {number: signal.signal(number, handler) for number in OWNER_SIGNALS}
        # raised in a destructor, the exception would be printed as a fault
        report, sys.unraisablehook = sys.unraisablehook, self._on_swallowed
        try:
            yield
        except StoppedWhileStarting:
            for number in OWNER_SIGNALS:
                # a second signal must not cut the orderly end short
                signal.signal(number, signal.SIG_IGN)
            raise
        finally:
            sys.unraisablehook = report
            for number, earlier in before.items():
                # the server may have put its own in place, which stays
                if signal.getsignal(number) == handler:
                    signal.signal(number, earlier)

    def check(self) -> None:
        """Raise StoppedWhileStarting if a signal has come."""
        if self._has_come:
            raise StoppedWhileStarting(0)

    def _on_swallowed(self, found: sys.UnraisableHookArgs) -> None:
        """Say nothing of an exception of ours."""
        if not isinstance(found.exc_value, StoppedWhileStarting):
            sys.__unraisablehook__(found)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        self.check()


start_signals = StartSignals()
