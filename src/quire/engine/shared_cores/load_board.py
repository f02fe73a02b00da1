"""Load of each API server of one engine, in memory that they share.

Each writes its own row and adds up those of the others. So a limit on what may wait holds for all
of them together, up to what several admit at the same moment.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import NamedTuple

_COLUMNS = 4
_ITEM = 8


class Load(NamedTuple):
    """Unfinished completions, queued prompt tokens, completions per second, HTTP requests."""

    num_requests: float = 0.0
    num_tokens: float = 0.0
    ended_per_s: float = 0.0
    num_answered: float = 0.0


class LoadBoard:
    """The shared memory, a row of numbers for each of `num_rows` servers; `fd` is inherited."""

    def __init__(self, num_rows: int, fd: int | None = None) -> None:
        self.fd = _new_file(num_rows) if fd is None else fd
        self._memory = mmap.mmap(self.fd, num_rows * _COLUMNS * _ITEM)
        self._words = memoryview(self._memory).cast("d")

    def write(self, row: int, load: Load) -> None:
        """Say what a server has to do."""
        start = row * _COLUMNS
        for place, value in enumerate(load, start):
            self._words[place] = value

    def others(self, row: int) -> Load:
        words = self._words
        return Load(
            *(
                sum(words[column::_COLUMNS]) - words[row * _COLUMNS + column]
                for column in range(_COLUMNS)
            )
        )

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.fd)


def _new_file(num_rows: int) -> int:
    """A file without a name, as large as the board; on Linux in memory: no full disk harms it."""
    if sys.platform == "linux":
        fd = os.memfd_create("quire-load")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_rows * _COLUMNS * _ITEM)
    return fd


class Neighbours:
    """The other servers on the board, as server `row` sees them."""

    def __init__(self, board: LoadBoard, row: int) -> None:
        self._board = board
        self._row = row
        self._own = Load()

    def load(self) -> Load:
        return self._board.others(self._row)

    def tell(self, **changed: float) -> None:
        """Publish this server's load: the values of `Load` that are given."""
        self._own = self._own._replace(**changed)
        self._board.write(self._row, self._own)
