"""The size of the KV pool from a device's measured memory."""

from __future__ import annotations

import msgspec


class MeasuredMemory(msgspec.Struct, frozen=True):
    """A device's free bytes before the engine took any, and with its weights, graphs and the
    workspace of its largest step in place; `share` of the former is the engine's.
    """

    free_at_start: int
    free_now: int
    share: float

    @property
    def room(self) -> int:
        """Bytes left for the KV cache, both of the share and of the free memory."""
        taken = max(0, self.free_at_start - self.free_now)
        # other programs may have taken memory since the start
        return max(0, min(int(self.free_at_start * self.share) - taken, self.free_now))

    def num_blocks(self, block_bytes: int, most: int) -> int:
        """Blocks that fit, including the null block, up to as many as can be used."""
        return min(most, self.room // block_bytes)


def gib(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"
