"""From logits to a token: the definitions that every provider of sampling must meet.

Each body computes a row from that row alone, with the same shapes whatever the batch, so that a
row's result is bitwise the same alone and in a batch. Formulas: penalties as in Keskar et al. 2019
(repetition) and the OpenAI API (frequency, presence), top-k as in Fan et al. 2018, top-p as in
Holtzman et al. 2020, min-p as in Nguyen et al. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.noise import negative_waiting_times, noise_bits
from quire.ops.vocab_row import BLOCK, VocabRow

_NUCLEUS_HEAD = 256
"""How many of the largest entries are tried first; sorting a row takes 15 ms at V = 152k."""
_BINS_PER_NAT = 16
_NUM_BINS = 512


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row of logits [R, V] -> (ids [R] int64, values [R]).

    The lowest id among equals. A row with a NaN has the value NaN. Two levels, because amax is
    vectorised and argmax is not: 2 ms instead of 9 at R = 32, V = 152k.
    """
    size = logits.shape[1]
    whole = size // BLOCK
    maxima = logits[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(2)
    if whole * BLOCK < size:
        maxima = torch.cat([maxima, logits[:, whole * BLOCK :].amax(1, keepdim=True)], dim=1)
    within = torch.arange(BLOCK, device=logits.device)
    ids = (maxima.argmax(1, keepdim=True) * BLOCK + within).clamp_max_(size - 1)
    entries = logits.gather(1, ids)
    best = entries.argmax(1, keepdim=True)
    return ids.gather(1, best).flatten(), entries.gather(1, best).flatten()


def penalize_repetition_(logits: Tensor, token_ids: Tensor, penalty: float) -> None:
    """l / penalty where l > 0, else l * penalty, for the tokens that occur; logits [V] in place.

    token_ids [n] int64, repeats allowed. O(n).
    """
    seen = logits[token_ids]
    logits[token_ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def penalize_counts_(
    logits: Tensor, token_ids: Tensor, frequency: float, presence: float, workspace: Tensor
) -> None:
    """l -= frequency * count, then l -= presence, for the tokens that occur; logits [V] in place.

    token_ids [n] int64 with repeats: what is counted. workspace [V] fp32 may hold anything and does
    so afterwards. O(n).
    """
    workspace[token_ids] = 0.0
    workspace.index_add_(0, token_ids, workspace.new_ones(token_ids.shape[0]))
    lowered = logits[token_ids] - workspace[token_ids] * frequency
    logits[token_ids] = lowered.sub_(presence)  # repeats write the same value


def survivors(row: VocabRow, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ids that min-p, then top-k, then top-p leave -> [n] int64 ascending, or None when all stay.

    min-p drops entries below peak + ln(min_p). top-k keeps what is >= the k-th largest, so ties
    with it survive; k <= 0 or >= V is off. top-p ranks what is left by (value descending, id
    ascending), renormalises, and keeps a token if the tokens ranked before it have less than top_p
    in sum; the first always stays. `row` has a finite peak and its temperature.
    """
    threshold = row.peak + math.log(min_p) if min_p > 0.0 else -math.inf
    if 0 < top_k < row.values.shape[0]:
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
    """How many tokens have less than `wanted` before them, given the inclusive mass [n]."""
    return 1 + int((mass[:-1] < wanted).count_nonzero())


def draw(row: VocabRow, ids: Tensor | None, hashes: Tensor, key: Tensor) -> int:
    """Draw one token from softmax(row), restricted to `ids` [n] ascending (None: all).

    `row` has a finite peak. An exponential race: the token with the largest exp(l - peak) / waiting
    time wins, which is argmax(l + Gumbel noise); the lower id among equals. hashes [V] and key [2]
    int32 come from `noise`. Leaving out a token that would have lost does not change the result. A
    token at -inf never wins: the peak's score is at least 1 / 16.7, its own is 0.
    """
    if ids is None:
        return VocabRow(_scores(row.values - row.peak, hashes, key)).first_max()
    return int(ids[_scores(row.values[ids] - row.peak, hashes[ids], key).argmax()])


def draw_rows(logits: Tensor, hashes: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` without restriction for each row of logits [R, V], keys [R, 2].

    -> (ids [R] int64, peaks [R]); a row whose peak is not finite has no meaningful id. Bitwise the
    same as one by one, because everything but maxima is per entry.
    """
    peaks = logits.amax(1, keepdim=True)
    scores = _scores(logits - peaks, hashes, keys[:, :, None].unbind(1))
    return greedy(scores)[0], peaks.flatten()


def _scores(differences: Tensor, hashes: Tensor, key: Tensor | Sequence[Tensor]) -> Tensor:
    times = negative_waiting_times(noise_bits(hashes, key[0], key[1]))
    return differences.exp_().neg_().div_(times)
