"""Masks: bit i of word w is token 32 * w + i, 1 if it is allowed."""

from __future__ import annotations

import numpy as np


def mask_words(vocab_size: int) -> int:
    """The number of int32 words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)


def allow(mask: np.ndarray, index: int) -> None:
    """Allow token `index` in a mask [ceil(V/32)] int32."""
    mask[index // 32] |= _bit(index)


def forbid(mask: np.ndarray, index: int) -> None:
    """Forbid token `index` in a mask [ceil(V/32)] int32."""
    mask[index // 32] &= ~_bit(index)


def _bit(index: int) -> np.int32:
    return np.uint32(1 << (index % 32)).view(np.int32)
