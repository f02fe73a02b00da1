"""The checksum of a block's content, by which damage is noticed wherever the block is kept."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from quire.hardware.native import find_native

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SUM_BYTES = 16
UNIT = 64
"""Bytes whose multiples contents are."""


def content_sum(content: Bytes) -> bytes:
    """The checksum of a content [B], B a multiple of 64.

    It tells accidents apart, not contents that somebody has chosen. Installations without native
    code have another one; they compute other bits anyway.
    """
    native, _ = find_native()
    if native is None:
        return hashlib.blake2b(content.data, digest_size=SUM_BYTES).digest()
    found: bytes = native.sum_block(content.ctypes.data, content.nbytes)
    return found
