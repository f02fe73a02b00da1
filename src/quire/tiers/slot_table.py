"""Host memory for blocks of K/V, with a table of what its slots have: memory that may outlive the
process that writes it.

The table is in the memory itself. An entry counts once its mark is set, which is done last, and the
content once its checksum is right; so whatever a process was doing when it died, the next one finds
whole contents, or none.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.hardware.native import find_native
from quire.step.transfers import BlockKey

_MAGIC = b"quire kv host 1\n"
_HEAD = struct.Struct("<16s40sQQ")
"""Magic, root, bytes of a slot, number of slots."""
_HEAD_BYTES = 128
_ENTRY = struct.Struct("<Q32sIQ16s")
"""Time of the last use, digest, KV group, bytes, checksum."""
_MARK = struct.Struct("<Q")
_COMMITTED = 0x6B76_626C_6F63_6B21
_ENTRY_BYTES = 128
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A content that was committed: the slot that has it, and the checksum that it must have."""

    place: int
    key: BlockKey
    num_bytes: int
    checksum: bytes
    used: int


class SlotTable:
    """The memory of `count` slots of `slot_bytes`, and what each of them has."""

    def __init__(
        self, slot_bytes: int, count: int, root: bytes = b"", fd: int = -1, offset: int = 0
    ) -> None:
        """`fd` is that of memory which others may have filled before; -1: this process has its own.
        Contents of another `root`, of 40 bytes, or of other slots are forgotten. `offset` is a
        multiple of 4096.
        """
        self.slot_bytes, self.count = slot_bytes, count
        self._slots_at = _slots_at(count)
        size = table_bytes(slot_bytes, count)
        if fd < 0:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer faults while it is filled
                with contextlib.suppress(OSError):
                    self.memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            self.memory = mmap.mmap(fd, size, offset=offset)
        head = _HEAD.pack(_MAGIC, root.ljust(40)[:40], slot_bytes, count)
        if self.memory[: _HEAD.size] != head:
            self.memory[:_HEAD_BYTES] = bytes(_HEAD_BYTES)
            for place in range(count):
                self.clear(place)
            # last: entries of another root must not be read under this head
            self.memory[: _HEAD.size] = head

    def touch_ahead(self) -> None:
        """Have the memory get its pages before it is written, for as long as the table lives."""
        native, _ = find_native()
        if native is not None:
            whole = np.frombuffer(self.memory, np.uint8)
            self._touching = native.TouchAhead(whole)
            self._touching.touch(whole.ctypes.data, whole.nbytes)

    def start_of(self, place: int) -> int:
        """The place of a slot's first byte in the memory."""
        return self._slots_at + place * self.slot_bytes

    def entries(self) -> Iterator[SlotEntry]:
        """The committed entries, slot by slot. A checksum was not compared yet."""
        for place in range(self.count):
            at = self._at(place)
            if _MARK.unpack_from(self.memory, at)[0] != _COMMITTED:
                continue
            used, digest, group, num_bytes, checksum = _ENTRY.unpack_from(self.memory, at + 8)
            if num_bytes <= self.slot_bytes:
                yield SlotEntry(place, (digest, group), num_bytes, checksum, used)

    def clear(self, place: int) -> None:
        """Let a slot have nothing, before it is written."""
        _MARK.pack_into(self.memory, self._at(place), 0)

    def commit(self, entry: SlotEntry) -> None:
        """Let a slot that is written have a content."""
        at, (digest, group) = self._at(entry.place), entry.key
        _ENTRY.pack_into(
            self.memory, at + 8, entry.used, digest, group, entry.num_bytes, entry.checksum
        )
        # last: a core that dies before this leaves an empty slot
        _MARK.pack_into(self.memory, at, _COMMITTED)

    def use(self, place: int, used: int) -> None:
        """Note the last use of a slot."""
        _MARK.pack_into(self.memory, self._at(place) + 8, used)

    def disown(self) -> None:
        """Let nobody find anything here later: contents are of this process from now on."""
        self.memory[:_HEAD_BYTES] = bytes(_HEAD_BYTES)

    @staticmethod
    def _at(place: int) -> int:
        return _HEAD_BYTES + place * _ENTRY_BYTES


def table_bytes(slot_bytes: int, count: int) -> int:
    """The memory for `count` slots, and their table."""
    return _slots_at(count) + -(-slot_bytes * count // _PAGE) * _PAGE


def most_slots(slot_bytes: int, num_bytes: int) -> int:
    """Number of slots in so much memory, the table not counted."""
    return max(1, num_bytes // slot_bytes)


def _slots_at(count: int) -> int:
    return -(-(_HEAD_BYTES + count * _ENTRY_BYTES) // _PAGE) * _PAGE
