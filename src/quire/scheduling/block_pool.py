"""The KV memory: N blocks, their reference counts, two free lists, and the keys under which cached
blocks are found.

A block's key is a SHA-256 digest chained over everything before it, so equal keys mean equal
prefixes. The first link contains what else determines the content: salt and adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from quire.scheduling.request import Request
from quire.step.transfers import BlockKey

_HELD = -2


class BlockListener(Protocol):
    """Is told which contents a pool has, as they come and go."""

    def published(self, block: int, key: BlockKey, request: Request, num_tokens: int) -> None:
        """A referenced block has become findable: see `BlockPool.publish`."""
        ...

    def evicted(self, block: int, key: BlockKey) -> None:
        """A block is not findable any more."""
        ...

    def cleared(self) -> None:
        """No block is findable any more."""
        ...

    def released(self, block: int) -> None:
        """A block has lost its last reference; its content stays until it is allocated again."""
        ...


class BlockPool:
    """Allocates blocks 1..N-1 (block 0 is the null block).

    A block without references stays findable under its key until it is allocated again. Free blocks
    are allocated in this order: those without a key, the latest first; those of the groups
    `evicted_first`, then the other cached ones, both least recently used first. Three doubly linked
    lists through the same two integer lists hold them, so a hit on a free block takes it out in
    O(1).

    Invariants (checked by `tests/support/simulation/invariants.py`):
    - a block is on a free list exactly when its reference count is 0;
    - `_by_key[k] == b` exactly when `_key[b] == k`.
    """

    def __init__(self, num_blocks: int, evicted_first: Collection[int] = ()) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs the null block, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.listeners: list[BlockListener] = []
        self.num_free = num_blocks - 1
        self._evicted_first = frozenset(evicted_first)
        self._ref = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}
        self.num_early = 0
        """Findable blocks of the groups that are evicted first."""
        # Entries 0, N and N + 1 of the links are the lists' anchors: next is the head, prev the
        # tail.
        self._early, self._late = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks), 0, self._early, self._late]
        self._prev = [num_blocks - 1, *range(num_blocks - 1), self._early, self._late]

    def find(self, key: BlockKey) -> int | None:
        """Return the block with this content, referenced or free; None if it was evicted."""
        return self._by_key.get(key)

    def is_free(self, block: int) -> bool:
        """Whether a block has no references, so that taking it uses up a free block."""
        return self._ref[block] == 0

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each; None (and no change) if fewer are free."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._first_free()
            self._unlink(block)
            self._forget(block)
            self._ref[block] = 1
            taken.append(block)
        self.num_free -= count
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, removing it from its free list if it was free."""
        for block in blocks:
            if self._ref[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self._ref[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in the given order: pass a request's tail first, so
        that it is evicted first.
        """
        for block in blocks:
            self._ref[block] -= 1
            assert self._ref[block] >= 0, f"block {block} was released more often than taken"
            if self._ref[block] == 0:
                self._link(block)
                self.num_free += 1
                for listener in self.listeners:
                    listener.released(block)

    def publish(self, block: int, key: BlockKey, request: Request, num_tokens: int) -> None:
        """Make a full block of a request findable, at the end of its first `num_tokens` tokens (0:
        it has its second content). Content that is findable in another block already stays there.
        """
        # the first copy stays the one that is found: others may be sharing it, and swapping them
        # would need new tables
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block
            self.num_early += key[1] in self._evicted_first
            for listener in self.listeners:
                listener.published(block, key, request, num_tokens)

    def forget(self, block: int) -> None:
        """Make a referenced block, which is to be written, not findable any more."""
        assert self._ref[block] > 0, "a free block has its place by its key"
        self._forget(block)

    def drop_earliest(self) -> bool:
        """Make the free block that is evicted first not findable; False if no group with such
        blocks has a free one.
        """
        block = self._next[self._early]
        if block == self._early:
            return False
        self._unlink(block)
        self._forget(block)
        self._link(block)
        return True

    def forget_all(self) -> None:
        """Make no block findable any more."""
        self._by_key = {}
        self._key = [None] * self.num_blocks
        self.num_early = 0
        for listener in self.listeners:
            listener.cleared()

    @property
    def usage(self) -> float:
        """The share of the blocks that are referenced, 0..1; 0 where there are none."""
        usable = self.num_blocks - 1
        return 1 - self.num_free / usable if usable else 0.0

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None
            self.num_early -= key[1] in self._evicted_first
            for listener in self.listeners:
                listener.evicted(block, key)

    def _first_free(self) -> int:
        """The next block to allocate; there must be one."""
        for anchor in (0, self._early, self._late):
            first: int = self._next[anchor]
            if first != anchor:
                return first
        raise AssertionError("no free block")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _HELD

    def _link(self, block: int) -> None:
        """Insert a block that has lost its last reference into its free list."""
        key = self._key[block]
        if key is None:
            # content that nobody can find is the cheapest to lose, and the block used last is still
            # in the processor's caches
            before = 0
        else:
            before = self._prev[self._early if key[1] in self._evicted_first else self._late]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after


class Lease:
    """References to blocks for as long as something outside of requests reads or writes them."""

    def __init__(self, pool: BlockPool, blocks: Iterable[int]) -> None:
        self.blocks = tuple(blocks)
        self._pool = pool
        pool.touch(self.blocks)

    def end(self) -> None:
        self._pool.release(self.blocks)
        self.blocks = ()


def root_key(
    cache_salt: str | None, adapter: int = 0, weights: int = 0, source: bytes = b""
) -> bytes:
    """Return the link before a request's first block: what must match besides the tokens.
    `weights` counts how often the model's weights have changed; `source` is the digest of the
    request's second content, which its tokens read.
    """
    # the number changes with the form of keys, since tiers keep them across releases
    digest = hashlib.sha256(b"quire block key 3")
    # no salt differs from the empty salt, and the length keeps salts and what follows apart
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode()
    digest.update(len(salt).to_bytes(8, "little") + salt)
    digest.update(adapter.to_bytes(8, "little") + weights.to_bytes(8, "little") + source)
    return digest.digest()


def next_key(parent: bytes, token_ids: Sequence[int], embedded: bytes = b"") -> bytes:
    """Return the key of the block with these tokens after the block `parent`; `embedded` names
    what stands at its placeholders (`Request.embedded_in`).

    Token counts are equal within a cache and the parent has 32 bytes, so the concatenation is
    unambiguous.
    """
    return hashlib.sha256(parent + array("i", token_ids).tobytes() + embedded).digest()
