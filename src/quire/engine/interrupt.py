"""Ctrl-C between the steps of an engine, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """While it is entered, Ctrl-C waits for the next `check()`; a second one comes through at once.

    A step that is cut in half would leave the scheduler and the runner with different views of the
    same requests. Outside the main thread, or where somebody has a handler of their own, it does
    nothing.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._before: Any = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def check(self) -> None:
        """Raise the KeyboardInterrupt that has come meanwhile, if any."""
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_due:
            signal.default_int_handler(signum, frame)
        self._is_due = True
