"""Finding the large entries of one row of logits without sorting it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 64
"""Ids per block. The maxima cost one read of the row; afterwards a query touches few blocks."""


class VocabRow:
    """One row of logits [V] fp32, with the maximum of each block of consecutive ids.

    The largest k entries lie in the k blocks with the largest maxima, so every query reads the
    maxima and a few blocks, and falls back to the whole row where its answer is a large part of it.
    The answers are exact; among equals the lower id is first. Every computation is on this row
    alone, so that its result cannot depend on other rows. The row must not change while this object
    is in use. In a row with NaN only `peak`, `first_max` and `top` have a meaning.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        whole = values.shape[0] // BLOCK
        maxima = values[: whole * BLOCK].view(whole, BLOCK).amax(1)
        if whole * BLOCK < values.shape[0]:
            maxima = torch.cat([maxima, values[whole * BLOCK :].amax().view(1)])
        self._maxima = maxima
        self.peak: float = maxima.amax().item()
        """The largest entry; NaN if there is a NaN anywhere."""

    def first_max(self) -> int:
        """The lowest id with the largest entry (the first NaN if there is one)."""
        start = int(self._maxima.argmax()) * BLOCK
        return start + int(self.values[start : start + BLOCK].argmax())

    def at_least(self, threshold: float) -> Tensor:
        """Ids of all entries >= threshold -> [n] int64, ascending."""
        blocks = (self._maxima >= threshold).nonzero().flatten()
        if 4 * blocks.shape[0] > self._maxima.shape[0]:
            # of many blocks: one pass over the row costs less than gathering their entries
            return (self.values >= threshold).nonzero().flatten()
        ids = self._ids_of(blocks)
        return ids[self.values[ids] >= threshold]

    def count_at_least(self, threshold: float) -> int:
        """The number of entries >= threshold: the rank of an entry with this value."""
        blocks = (self._maxima >= threshold).nonzero().flatten()
        if 4 * blocks.shape[0] > self._maxima.shape[0]:
            return int((self.values >= threshold).count_nonzero())
        return int((self.values[self._ids_of(blocks)] >= threshold).count_nonzero())

    def kth_largest(self, k: int) -> float:
        """The k-th largest entry, 1 <= k <= V."""
        if 4 * k > self._maxima.shape[0]:
            return self.values.topk(k).values[-1].item()
        bound = self._maxima.topk(k).values[-1].item()
        # from a bound of -inf on, every entry would be gathered
        if math.isinf(bound):
            return self.values.topk(k).values[-1].item()
        return self.values[self.at_least(bound)].topk(k).values[-1].item()

    def top(self, k: int) -> Tensor:
        """Ids of the k largest entries, largest first, 0 <= k <= V -> [k] int64."""
        if 4 * k > self._maxima.shape[0]:
            return self._top_of_row(k)
        # stable: of equal maxima the blocks with the lowest ids
        blocks = self._maxima.sort(descending=True, stable=True).indices[:k]
        return self._largest_of(self._ids_of(blocks.sort().values), k)

    def _top_of_row(self, k: int) -> Tensor:
        few = 8 * k < self.values.shape[0] and not math.isnan(self.peak)
        threshold = self.kth_largest(k) if few else -math.inf
        if threshold > -math.inf:
            return self.ranked(threshold)[:k]
        return self.values.sort(descending=True, stable=True).indices[:k]

    def _largest_of(self, ids: Tensor, k: int) -> Tensor:
        return ids[self.values[ids].sort(descending=True, stable=True).indices[:k]]

    def ranked(self, threshold: float) -> Tensor:
        """Ids of all entries >= threshold, largest first -> [n] int64."""
        ids = self.at_least(threshold)
        return self._largest_of(ids, ids.shape[0])

    def log_sum(self) -> float:
        """log of the sum of exp(entry - peak): what a log-softmax subtracts in addition to the
        peak.
        """
        return math.log((self.values - self.peak).exp_().sum().item())

    def _ids_of(self, blocks: Tensor) -> Tensor:
        within = torch.arange(BLOCK, device=blocks.device)
        ids = (blocks[:, None] * BLOCK + within).flatten()
        size = self.values.shape[0]
        return ids if size % BLOCK == 0 else ids[ids < size]
