"""The KV memory: N blocks, reference counts, and one list that is both the free list and the LRU
of cached blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

BlockKey = tuple[bytes, int]
"""(chained content digest, KV group)."""

_HELD = -2


class BlockPool:
    """Blocks 1..N-1 to be handed out (block 0 is the null block).

    A block without references stays findable under its key until it is handed out again. The free
    list is doubly linked through two integer lists, so a hit on a free block takes it out in O(1).

    Invariants (checked by `scheduling/invariants.py`):
    - a block is on the free list exactly when its reference count is 0;
    - `_by_key[k] == b` exactly when `_key[b] == k`.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least two blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._ref = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}
        # Entry 0 of the links is the list's anchor: next[0] is the head, prev[0] the tail.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    def find(self, key: BlockKey) -> int | None:
        """The block that holds this content, referenced or free; None when it is gone."""
        return self._by_key.get(key)

    def is_free(self, block: int) -> bool:
        """True when nobody holds a reference, so that taking it costs one of the free blocks."""
        return self._ref[block] == 0

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, oldest cached content last; None (and
        no change) when fewer are free.
        """
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._next[0]
            self._unlink(block)
            self._forget(block)
            self._ref[block] = 1
            taken.append(block)
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, taking it off the free list where it was there."""
        for block in blocks:
            if self._ref[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self._ref[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in the given order: pass a request's tail first, so
        that it is evicted first.

        A block with findable content goes to the list's end (evicted last), any other to its front
        (used next).
        """
        for block in blocks:
            self._ref[block] -= 1
            assert self._ref[block] >= 0, f"block {block} was released more often than taken"
            if self._ref[block] == 0:
                self._link(block, last=self._key[block] is not None)
                self.num_free += 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a full block findable. Content that is findable in another block already stays
        there.
        """
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def forget_all(self) -> None:
        """Make no block findable any more."""
        self._by_key.clear()
        self._key = [None] * self.num_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that is referenced, 0..1."""
        return 1 - self.num_free / (self.num_blocks - 1)

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _HELD

    def _link(self, block: int, *, last: bool) -> None:
        before = self._prev[0] if last else 0
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
