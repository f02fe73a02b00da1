"""Reports of workers on transfers between the pool's blocks and a tier."""

from __future__ import annotations

import msgspec

BlockKey = tuple[bytes, int]
"""A content of a block: its digest, chained over everything before it, and the KV group."""


class TierChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A content has come to the tier, or has gone from it."""

    key: bytes
    group: int
    is_there: bool


class TransferReport(msgspec.Struct, array_like=True, gc=False):
    """The events since the last report: the numbers of transfers that have ended well, and
    of those that have failed, and, in order, how the tier's contents have changed.

    `is_opening`: more contents may come without a transfer, while a folder is read.
    """

    done: list[int] = []
    failed: list[int] = []
    changes: list[TierChange] = []
    loaded_bytes: int = 0
    stored_bytes: int = 0
    is_opening: bool = False
