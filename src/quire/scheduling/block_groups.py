"""What one group of layers needs of the KV memory: which cached blocks make a hit, and which are
not read any more.

All layers of a group look back equally far. Every group numbers its blocks by token position
alike, so that a table index is `position // block_size` everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.scheduling.step import NULL_BLOCK

Find = Callable[[int], int | None]
"""Table index -> the cached block with that content in this group, if any."""


class BlockGroup(Protocol):
    """One kind of layer memory. Counts are in blocks of `block_size` tokens."""

    def longest_hit(self, find: Find, limit: int) -> int:
        """The most leading blocks, at most `limit`, behind which a request could go on with what
        is cached.
        """
        ...

    def num_unread(self, position: int) -> int:
        """How many leading table entries no query at `position` or later reads."""
        ...

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a request of `num_tokens` holds at once, when steps bring up to
        `chunk` tokens.
        """
        ...


class FullGroup:
    """Layers that read every earlier token."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def longest_hit(self, find: Find, limit: int) -> int:
        for index in range(limit):
            if find(index) is None:
                return index
        return limit

    def num_unread(self, position: int) -> int:
        return 0

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        return -(-num_tokens // self.block_size)


class SlidingGroup:
    """Layers that read the last `window` tokens, their own included."""

    def __init__(self, block_size: int, window: int) -> None:
        self.block_size = block_size
        self.window = window

    def longest_hit(self, find: Find, limit: int) -> int:
        end = limit
        while end > 0:
            missing = self._last_missing(find, end)
            if missing is None:
                return end
            end = missing
        return 0

    def _last_missing(self, find: Find, end: int) -> int | None:
        """The last index that a query right behind `end` blocks reads and that is not cached."""
        first = self.num_unread(end * self.block_size)
        return next((i for i in range(end - 1, first - 1, -1) if find(i) is None), None)

    def num_unread(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        whole = -(-num_tokens // self.block_size)
        # The window's and the chunk's tokens may begin and end inside a block.
        return min(whole, -(-(self.window - 1 + chunk) // self.block_size) + 1)


def hit_blocks(group: BlockGroup, find: Find, num_blocks: int, position: int) -> list[int]:
    """The table of a hit of `num_blocks` blocks: cached blocks where `position` on reads, the null
    block before.
    """
    unread = group.num_unread(position)
    table = [NULL_BLOCK] * unread
    for index in range(unread, num_blocks):
        block = find(index)
        assert block is not None, "a hit was cut short between counting and taking it"
        table.append(block)
    return table
