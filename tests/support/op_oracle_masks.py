"""The oracle of the masks of grammars: one token at a time."""

from __future__ import annotations

import math


def mask_logits(logits, rows, mask) -> None:
    for row, words in zip(rows.tolist(), mask.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                logits[row, token] = -math.inf
