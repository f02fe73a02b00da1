"""Memory for blocks of K/V that belongs to whoever starts a core, so that it outlives the core.

It has no name in the system, and goes with the last process that has it, whatever that died of.
"""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger(__name__)


class HostMemory:
    """A region for each of `num_workers`, of which each takes what it needs of `host_bytes` and a
    table. What nobody has touched takes no memory.
    """

    def __init__(self, host_bytes: int, num_workers: int) -> None:
        self.fds: list[int] = []
        """The descriptor; none where the system has no such memory: then a core has its own."""
        if not hasattr(os, "memfd_create"):
            return
        try:
            self.fds.append(os.memfd_create("quire-kv", os.MFD_CLOEXEC))
            os.ftruncate(self.fds[0], num_workers * region_bytes(host_bytes))
        except OSError as error:
            logger.warning("K/V in host memory will not outlive a core: %s", error)
            self.close()

    def close(self) -> None:
        """Give the memory up. Idempotent."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []


def region_bytes(host_bytes: int) -> int:
    """The bytes from a worker's region to the next, with the table of the smallest slots."""
    return (-(-host_bytes // 4096) + 1) * 4096 * 4
