"""Blocks of K/V in host memory: slots of one size, the least recently used overwritten first.

A store belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from quire.step.transfers import BlockKey

S = TypeVar("S")


class HostStore(Generic[S]):
    """Keeps a block in each of `slots`, by its key. What a slot is made of is the caller's concern:
    the store only says which one has, or gets, a content.

    Invariant: a slot is free, or has exactly one key.
    """

    def __init__(self, slots: Sequence[S]) -> None:
        self._slots = slots
        self._free = list(range(len(slots)))
        self._by_key: OrderedDict[BlockKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._by_key)

    def get(self, key: BlockKey) -> S | None:
        """Return the slot with this content, which becomes the most recently used."""
        place = self._by_key.get(key)
        if place is None:
            return None
        self._by_key.move_to_end(key)
        return self._slots[place]

    def put(self, key: BlockKey) -> tuple[S, BlockKey | None]:
        """Return the slot for a new content, and the key of the one that it takes the place of. The
        caller fills the slot before it calls the store again, or calls `drop`.
        """
        assert key not in self._by_key, "a content is stored once"
        evicted = None
        if self._free:
            place = self._free.pop()
        else:
            evicted, place = self._by_key.popitem(last=False)
        self._by_key[key] = place
        return self._slots[place], evicted

    def drop(self, key: BlockKey) -> None:
        """Forget a content."""
        self._free.append(self._by_key.pop(key))

    def clear(self) -> None:
        """Forget all contents."""
        self._free += self._by_key.values()
        self._by_key.clear()
