"""min-p, top-k and top-p of one row, as plain torch does them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.sampling.vocab_row import VocabRow

_NUCLEUS_HEAD = 256
"""Number of the largest entries that are tried first; sorting a row takes 15 ms at V = 152k."""
_BINS_PER_NAT = 16
_NUM_BINS = 512


def survivors(row: VocabRow, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ids that min-p, then top-k, then top-p leave -> [n] int64 ascending, or None when all stay.

    min-p drops entries below peak + ln(min_p). top-k keeps what is >= the k-th largest, so ties
    with it survive; k <= 0 or >= V is off. top-p ranks what is left by (value descending, id
    ascending), renormalises, and keeps a token if the tokens ranked before it have less than top_p
    in sum; the first always stays. `row` has a finite peak and its temperature.
    """
    threshold = row.peak + math.log(min_p) if min_p > 0.0 else -math.inf
    if 0 < top_k < row.values.shape[0]:
        # what is equal to the k-th stays, too
        threshold = max(threshold, row.kth_largest(top_k))
    ids = row.at_least(threshold) if threshold > -math.inf else None
    if top_p >= 1.0:
        return ids
    return (_nucleus_of_all(row, top_p) if ids is None else _nucleus(row, ids, top_p)).sort().values


def _nucleus(row: VocabRow, ids: Tensor, top_p: float) -> Tensor:
    order = row.values[ids].sort(descending=True, stable=True)
    mass = (order.values - row.peak).exp_().cumsum(0, dtype=torch.float64)
    return ids[order.indices[: _cut(mass, top_p * mass[-1].item())]]


def _nucleus_of_all(row: VocabRow, top_p: float) -> Tensor:
    weights = (row.values - row.peak).exp_()
    wanted = top_p * weights.sum(dtype=torch.float64).item()
    for candidates in (_head, _above_bin, _everything):
        ids = candidates(row, weights, wanted)
        mass = weights[ids].cumsum(0, dtype=torch.float64)
        if mass[-1].item() >= wanted:  # the cut lies within: exact, the rest cannot matter
            break
    return ids[: _cut(mass, wanted)]


def _head(row: VocabRow, weights: Tensor, wanted: float) -> Tensor:
    return row.top(min(_NUCLEUS_HEAD, weights.shape[0]))


def _above_bin(row: VocabRow, weights: Tensor, wanted: float) -> Tensor:
    """The largest entries, sorted, down to where a histogram of the mass says that it suffices."""
    bins = (row.peak - row.values).mul_(_BINS_PER_NAT).clamp_max_(_NUM_BINS - 1).int()
    mass = torch.bincount(bins, weights.double(), _NUM_BINS).cumsum(0)
    last_bin = int((mass < wanted).count_nonzero())
    return row.ranked(row.peak - (last_bin + 1) / _BINS_PER_NAT)


def _everything(row: VocabRow, weights: Tensor, wanted: float) -> Tensor:
    return row.top(weights.shape[0])


def _cut(mass: Tensor, wanted: float) -> int:
    """The number of tokens with less than `wanted` before them, given the inclusive mass [n]."""
    return 1 + int((mass[:-1] < wanted).count_nonzero())
