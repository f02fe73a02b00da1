"""Restricting threads to logical CPUs. Threads that are started later inherit the restriction."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator

from quire.hardware.cpu_list import format_cpus

logger = logging.getLogger(__name__)


def bind_thread(cpus: Collection[int]) -> None:
    """Let the calling thread, and threads that it starts from now on, run on `cpus` alone. Does
    nothing where `cpus` is empty or the system has no such call; a refusal is logged.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # forbidden in a sandbox, or the CPUs have gone offline
        logger.warning("Threads are not bound to CPUs %s: %s.", format_cpus(cpus), error)


@contextlib.contextmanager
def bound_thread(cpus: Collection[int]) -> Iterator[None]:
    """`bind_thread` for the calling thread in a block; threads started there stay bound."""
    if not cpus or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    bind_thread(cpus)
    try:
        yield
    finally:
        bind_thread(before)
