"""Limits for a process that does one task of a client after the other. The kernel enforces them."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

OVER_TIME = signal.SIGPROF
"""The signal that ends a process whose task takes more than its CPU time."""


def limit_memory(num_bytes: int) -> None:
    """Let this process take `num_bytes` more of address space, and leave no core file."""
    import psutil

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def cpu_time(seconds: float) -> Iterator[None]:
    """End this process by `OVER_TIME` where the block takes more CPU time, of all threads.

    RLIMIT_CPU would not do: it counts from the start of the process in ticks of the scheduler,
    which run ahead of the exact clocks by seconds a minute where processes sleep and wake often.
    """
    signal.signal(OVER_TIME, signal.SIG_DFL)
    # a timer and not RLIMIT_CPU, which counts from the start of the process
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
