"""The signals that tell a service to stop: child processes leave them to their starter.

A signal to all processes at once, as systemd sends it, thus lets the starter end them in order.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

OWNER_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def leave_to_owner() -> None:
    """Ignore them from now on; they are no longer held back."""
    for number in OWNER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OWNER_SIGNALS)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold them back: what the block starts and makes has an owner before the exception of a
    handler can come, and a process that is started here holds them back until it ignores them.
    """
    held: list[int] = []
    handlers: dict[int, Callable[..., object]] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OWNER_SIGNALS)
    try:
        if threading.current_thread() is threading.main_thread():
            # another thread may still get them, and handlers run in this one
            found = [(int(number), signal.getsignal(number)) for number in OWNER_SIGNALS]
            handlers = {number: each for number, each in found if callable(each)}
            for number in handlers:
                signal.signal(number, lambda number, frame: held.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in held:
            signal.raise_signal(number)
