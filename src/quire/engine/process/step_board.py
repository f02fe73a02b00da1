"""Which requests a core has in its steps, written where it can be read after the core's death.

A file that the core maps into memory: writing is a copy, and what was written outlives a process
that is killed, whatever the signal.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Collection
from pathlib import Path

_UNSURE = 2**64 - 1
_ITEM = 8


class StepBoard:
    """The board of one incarnation of a core, with room for `capacity` handles.

    While handles are being written, the first word marks them as incomplete. Raises OSError on a
    full disk, where it leaves an empty file: nothing is known then.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._capacity = capacity
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # without room writing would end in SIGBUS
                os.posix_fallocate(fd, 0, (capacity + 1) * _ITEM)
            os.ftruncate(fd, (capacity + 1) * _ITEM)
            self._memory = mmap.mmap(fd, (capacity + 1) * _ITEM)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self._written: Collection[int] | None = None

    def write(self, handles: Collection[int]) -> None:
        """Write the requests of the steps that run from now on. The object that was written last is
        not written again.
        """
        if handles is self._written:
            return
        self._written = handles
        words = self._words
        words[0] = _UNSURE
        if len(handles) <= self._capacity:
            words[1 : len(handles) + 1] = memoryview(array("Q", handles))
            words[0] = len(handles)

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._words.release()
        self._memory.close()


def board_path(folder: Path, engine_index: int, incarnation: int) -> Path:
    """The path of the board of one incarnation of a core."""
    return folder / f"step-{engine_index}-{incarnation}"


def read_step_board(path: Path) -> frozenset[int] | None:
    """Read a core's last entry; None if it is incomplete, or cannot be read. Without any it had no
    requests.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return None
    words = memoryview(data[: len(data) // _ITEM * _ITEM]).cast("Q")
    if not words or words[0] >= len(words):
        return None
    return frozenset(words[1 : words[0] + 1])
