"""Signs of life of the ranks, in memory that they share with their core.

The memory has no name and goes with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

SIGNS = struct.Struct("<QQ")
"""`RankSigns` as a rank sends them over a network."""

_WORDS = 8
"""Words of 8 bytes in the line of a rank, which fills a cache line."""
_BEAT, _DONE = 0, 1


@dataclass(frozen=True, slots=True)
class RankSigns:
    """The signs of one rank: how often its thread of signs has turned, and how many tasks its loop
    has ended.
    """

    beat: int
    num_done: int


class RankBoard:
    """The board of `size` ranks. Each writes its own line, the core reads all."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self._memory = mmap.mmap(fd, size * _WORDS * 8)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def open(cls, size: int) -> RankBoard:
        fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, size * _WORDS * 8)
        return cls(fd, size)

    def fileno(self) -> int:
        """The descriptor that ranks inherit."""
        return self._fd

    def beat(self, rank: int) -> None:
        """State that a rank's process runs."""
        self._words[rank * _WORDS + _BEAT] += 1

    def note_done(self, rank: int) -> None:
        """State that a rank has ended a task."""
        self._words[rank * _WORDS + _DONE] += 1

    def signs(self) -> list[RankSigns]:
        """The signs of all ranks."""
        lines = (self._words[rank * _WORDS :] for rank in range(self.size))
        return [RankSigns(line[_BEAT], line[_DONE]) for line in lines]

    def close(self) -> None:
        """Unmap the memory and close the descriptor. Idempotent."""
        if self._fd < 0:
            return
        self._words.release()
        self._memory.close()
        os.close(self._fd)
        self._fd = -1
