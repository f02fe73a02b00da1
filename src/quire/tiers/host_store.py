"""Blocks of K/V in host memory: slots of one size, the least recently used overwritten first.

A store belongs to one thread; another one reads only what `hold` keeps in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.step.transfers import BlockKey
from quire.tiers.slot_table import SlotEntry, SlotTable

S = TypeVar("S")


@dataclass(slots=True)
class StoredContent(Generic[S]):
    """A content: its slot, its bytes there, and the checksum that they have."""

    slot: S
    place: int
    num_bytes: int
    checksum: bytes
    num_holders: int = 0


class HostStore(Generic[S]):
    """Keeps a block in each of `slots`, by its key. What a slot is made of is the caller's concern:
    the store only says which one has, or gets, a content.

    Invariant: a slot is free, is being filled, or has exactly one key; `table` says the last.
    """

    def __init__(self, slots: Sequence[S], table: SlotTable) -> None:
        """`table` is that of the memory of the slots. What it has already is kept."""
        self._slots, self._table = slots, table
        self._by_key: OrderedDict[BlockKey, StoredContent[S]] = OrderedDict()
        self._num_uses = 0
        self._num_held = 0
        # the order of use goes on where the process before this one has left it
        found = sorted(table.entries(), key=lambda entry: entry.used)
        for entry in found:
            if entry.key in self._by_key:
                table.clear(entry.place)
                continue
            self._by_key[entry.key] = StoredContent(
                slots[entry.place], entry.place, entry.num_bytes, entry.checksum
            )
            self._num_uses = entry.used
        taken = {content.place for content in self._by_key.values()}
        self._free = [place for place in range(len(slots)) if place not in taken]

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._by_key)

    def get(self, key: BlockKey) -> StoredContent[S] | None:
        """Return the content, which becomes the most recently used."""
        content = self._by_key.get(key)
        if content is None:
            return None
        self._by_key.move_to_end(key)
        self._num_uses += 1
        self._table.use(content.place, self._num_uses)
        return content

    def peek(self, key: BlockKey) -> StoredContent[S] | None:
        """Return the content, whose last use stays what it was."""
        return self._by_key.get(key)

    def make_room(self) -> tuple[int, BlockKey | None] | None:
        """Return the place of a slot that is free from now on, and the key of the content that it
        had; None: each is held. The caller fills it, then calls `commit` or `give_back`.
        """
        if self._free:
            return self._free.pop(), None
        for key, content in self._by_key.items():
            if not content.num_holders:
                del self._by_key[key]
                self._table.clear(content.place)
                return content.place, key
        return None

    def slot(self, place: int) -> S:
        return self._slots[place]

    def commit(self, place: int, key: BlockKey, num_bytes: int, checksum: bytes) -> None:
        """State that a slot is filled with a content, which is not stored yet."""
        assert key not in self._by_key, "a content is stored once"
        self._num_uses += 1
        self._table.commit(SlotEntry(place, key, num_bytes, checksum, self._num_uses))
        self._by_key[key] = StoredContent(self._slots[place], place, num_bytes, checksum)

    def give_back(self, place: int) -> None:
        """State that a slot is not filled after all."""
        self._free.append(place)

    def hold(self, content: StoredContent[S]) -> bool:
        """Keep a content in its slot, which another thread reads, until `release`. False, and no
        change, where half of the slots are held already: others need room.
        """
        if not content.num_holders:
            if 2 * self._num_held >= len(self._slots):
                return False
            self._num_held += 1
        content.num_holders += 1
        return True

    def release(self, key: BlockKey, content: StoredContent[S]) -> None:
        """End a `hold`. The slot of a content that was dropped meanwhile is free from now on."""
        content.num_holders -= 1
        if not content.num_holders:
            self._num_held -= 1
            if self._by_key.get(key) is not content:
                self._free.append(content.place)

    def drop(self, key: BlockKey) -> None:
        content = self._by_key.pop(key)
        self._table.clear(content.place)
        # a reader still has the slot, which `release` then frees
        if not content.num_holders:
            self._free.append(content.place)

    def clear(self) -> None:
        for key in list(self._by_key):
            self.drop(key)

    def disown(self) -> None:
        """Let no later process find anything in the memory."""
        self._table.disown()
