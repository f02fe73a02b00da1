"""Reports of workers on transfers between the pool's blocks and a tier."""

from __future__ import annotations

import msgspec

BlockKey = tuple[bytes, int]
"""A content of a block: its digest, chained over everything before it, and the KV group."""


ROWS_GROUP = 9999
"""Stands in place of a KV group in names of contents that are rows of encoders."""
CPU, STORAGE = "CPU", "STORAGE"
"""The media of a tier: host memory, and files."""


class TierChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A content has come to a medium of the tier, or has gone from it."""

    key: bytes
    group: int
    is_there: bool
    medium: str = CPU


class TransferReport(msgspec.Struct, array_like=True, gc=False):
    """The events since the last report: the numbers of transfers that have ended well, and
    of those that have failed, and, in order, how the tier's contents have changed.

    `is_opening`: more contents may come without a transfer, while a folder is read. `broken`: those
    of `failed` whose contents were there, but were damaged or could not be read in time; of the
    others a content has made room for another one meanwhile.
    """

    done: list[int] = []
    failed: list[int] = []
    changes: list[TierChange] = []
    loaded_bytes: int = 0
    stored_bytes: int = 0
    is_opening: bool = False
    broken: list[int] = []
