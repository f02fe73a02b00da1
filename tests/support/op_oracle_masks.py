"""The oracle of the masks of grammars: one token at a time."""

from __future__ import annotations

import math

from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Ask for each token's bit."""
    for row, words in zip(rows.tolist(), mask.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                logits[row, token] = -math.inf
