"""Memory of the processes of an engine."""

from __future__ import annotations

import contextlib


def resident_bytes(pid: int) -> int:
    """The resident memory of a process and its descendants; files that several have mapped count
    once for each. A process that ends meanwhile counts for nothing.
    """
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total
