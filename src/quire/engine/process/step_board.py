"""The requests that a core works on, written where they can be read after the core's death: those
in its steps, and the one that it takes in.

A file that the core maps into memory: writing is a copy, and what was written outlives a process
that is killed, whatever the signal.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Collection
from pathlib import Path

from quire.file_errors import naming

_UNSURE = 2**64 - 1
_ITEM = 8


class StepBoard:
    """The board of one incarnation of a core, with room for `capacity` handles in steps.

    The first word counts them, and the word after the last has one more than the handle that is
    taken in (0: none is). While handles are being written, the first word marks them as incomplete.
    Raises OSError on a full disk, where it leaves an empty file: nothing is known then.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._capacity = capacity
        size = (capacity + 2) * _ITEM
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with naming(path):
                if hasattr(os, "posix_fallocate"):  # without room writing would end in SIGBUS
                    os.posix_fallocate(fd, 0, size)
                os.ftruncate(fd, size)
                self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self._written: Collection[int] | None = None

    def write(self, handles: Collection[int]) -> None:
        """Write the requests of the steps that run from now on; the same object is written once."""
        if handles is self._written:
            return
        self._written = handles
        words = self._words
        words[0] = _UNSURE
        if len(handles) <= self._capacity:
            words[1 : len(handles) + 1] = memoryview(array("Q", handles))
            words[0] = len(handles)

    def note_intake(self, handle: int | None) -> None:
        """Note the request that is decoded and queued from now on; None: it has been."""
        self._words[self._capacity + 1] = 0 if handle is None else handle + 1

    def close(self) -> None:
        """Unmap the memory; the file stays."""
        self._words.release()
        self._memory.close()


def board_path(folder: Path, engine_index: int, incarnation: int) -> Path:
    """The path of the board of one incarnation of a core."""
    return folder / f"step-{engine_index}-{incarnation}"


def read_step_board(path: Path) -> frozenset[int] | None:
    """A core's last entry; None: incomplete or unreadable. Without any it had no requests."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return None
    words = memoryview(data[: len(data) // _ITEM * _ITEM]).cast("Q")
    if len(words) < 2 or words[0] > len(words) - 2:
        return None
    taken_in = {words[-1] - 1} if words[-1] else set()
    return frozenset(words[1 : words[0] + 1]) | taken_in
