"""The use of KV memory by one group of layers: which cached blocks make a hit, and which blocks are
no longer read.

All layers of a group attend equally far back. A table of a group that keeps tokens is indexed by
`position // block_size`; one of recurrent state is a ring that does not grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.scheduling.settings import KVGroupSpec
from quire.step.plan import NULL_BLOCK

Find = Callable[[int], int | None]
"""Index -> the cached block with the content of the group's block at this index, if any."""


class BlockGroup(Protocol):
    """One kind of layer memory. Counts are in blocks of `block_size` tokens."""

    block_size: int

    def longest_hit(self, find: Find, limit: int) -> int:
        """Return the most leading blocks, up to `limit`, after which a request can continue from
        the cache.
        """
        ...

    def hit_blocks(self, find: Find, num_blocks: int) -> list[int]:
        """Return the table of a request after a hit of `num_blocks` blocks: cached blocks where it
        will read, the null block before.
        """
        ...

    def num_unread(self, position: int) -> int:
        """Return how many leading table entries no query at `position` or later reads."""
        ...

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at once, if steps compute up
        to `chunk` tokens.
        """
        ...

    def num_blocks(self, num_tokens: int) -> int:
        """Return the table length of a request with `num_tokens` computed tokens."""
        ...


def block_group(spec: KVGroupSpec, block_size: int, num_drafts: int) -> BlockGroup:
    """Build the group that a spec describes. Raises ValueError for an invalid block size."""
    size = spec.block_size or block_size
    if size % block_size:
        raise ValueError(f"a group's block size {size} is not a multiple of {block_size}")
    if spec.kind == "state":
        return StateGroup(block_size, num_drafts)
    if spec.kind == "source":
        return SourceGroup(size)
    if spec.kind == "none":
        return EmptyGroup(block_size)
    return FullGroup(size) if spec.window is None else SlidingGroup(size, spec.window)


class FullGroup:
    """Layers that read every earlier token."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def longest_hit(self, find: Find, limit: int) -> int:
        for index in range(limit):
            if find(index) is None:
                return index
        return limit

    def hit_blocks(self, find: Find, num_blocks: int) -> list[int]:
        return [_found(find, index) for index in range(num_blocks)]

    def num_unread(self, position: int) -> int:
        return 0

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        return self.num_blocks(num_tokens)

    def num_blocks(self, num_tokens: int) -> int:
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

    def hit_blocks(self, find: Find, num_blocks: int) -> list[int]:
        unread = self.num_unread(num_blocks * self.block_size)
        found = [_found(find, index) for index in range(unread, num_blocks)]
        return [NULL_BLOCK] * unread + found

    def _last_missing(self, find: Find, end: int) -> int | None:
        """The last index that a query right after `end` blocks reads and that is not cached."""
        first = self.num_unread(end * self.block_size)
        return next((i for i in range(end - 1, first - 1, -1) if find(i) is None), None)

    def num_unread(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        # The window's and the chunk's tokens may begin and end inside a block.
        most = -(-(self.window - 1 + chunk) // self.block_size) + 1
        return min(self.num_blocks(num_tokens), most)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class _WithoutTokens:
    """Layers that have no blocks for tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def hit_blocks(self, find: Find, num_blocks: int) -> list[int]:
        return []

    def num_unread(self, position: int) -> int:
        return 0

    def num_needed(self, num_tokens: int, chunk: int) -> int:
        return self.num_blocks(num_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        return 0


class StateGroup(_WithoutTokens):
    """Layers with a recurrent state: a ring of blocks (`NewRow.block_ids`) per request.

    A step writes the state before its first draft and after each draft. It must not overwrite the
    state that it reads, so that it can be run again: hence two blocks more than drafts. A hit is a
    cached copy of the state at a block border; the request gets a copy of it in a block of its own.
    """

    def __init__(self, block_size: int, num_drafts: int) -> None:
        super().__init__(block_size)
        self.ring_size = num_drafts + 2

    def longest_hit(self, find: Find, limit: int) -> int:
        return next((end for end in range(limit, 0, -1) if find(end - 1) is not None), 0)

    def num_blocks(self, num_tokens: int) -> int:
        return self.ring_size


class SourceGroup(_WithoutTokens):
    """Layers that read the request's second content: the length of a table follows from that, not
    from the tokens (`source_blocks.py`).
    """

    def num_source_blocks(self, num_rows: int) -> int:
        """Return the table length for a source of `num_rows` rows."""
        return -(-num_rows // self.block_size)

    def longest_hit(self, find: Find, limit: int) -> int:
        return limit


class EmptyGroup(_WithoutTokens):
    """Layers that keep nothing, so that nothing of a prompt can be reused."""

    def longest_hit(self, find: Find, limit: int) -> int:
        return 0


def _found(find: Find, index: int) -> int:
    block = find(index)
    assert block is not None, "a hit was cut short between counting and taking it"
    return block
