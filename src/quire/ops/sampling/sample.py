"""From logits to a token: the definitions that every provider of sampling must meet.

Each body computes a row from that row alone, with the same shapes whatever the batch, so that a
row's result is bitwise the same alone and in a batch. Formulas: top-k as in Fan et al. 2018, top-p
as in Holtzman et al. 2020, min-p as in Nguyen et al. 2024.

The least that any of them can do is to read the logits once: 4 R V bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.registry import op
from quire.ops.sampling.filters import survivors
from quire.ops.sampling.noise import negative_waiting_times, noise_bits
from quire.ops.sampling.vocab_row import BLOCK, VocabRow

_ENTRIES_TOGETHER = 2**17
"""Number of logits that are worked on at once: half a MiB stays in a core's cache."""


class TopLogits(NamedTuple):
    """Ingredients of log-probabilities: log p(entry) = (entry - peak) - log_sum.

    top_ids [R, n] int32 and top_values [R, n] fp32: the largest entries, largest first, the lower
    id first among equals. ranks [R] int32: how many entries are >= the given token's. peaks [R]
    fp32: the largest entry, log_sums [R]: log of the sum of exp(entry - peak). A row with a NaN has
    a NaN in both and nothing else of meaning; a row without a finite peak has no log_sum but NaN.
    """

    top_ids: Tensor
    top_values: Tensor
    ranks: Tensor
    peaks: Tensor
    log_sums: Tensor


@op(is_invariant=True)
def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row of logits [R, V] fp32 -> (ids [R] int64, values [R] fp32).

    The lowest id among equals. A row with a NaN has the value NaN; the id of a row without a finite
    value is 0. Two levels, because amax is vectorised and argmax is not: 2 ms instead of 9 at
    R = 32, V = 152k.
    """
    size = logits.shape[1]
    whole = size // BLOCK
    maxima = logits[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(2)
    if whole * BLOCK < size:
        maxima = torch.cat([maxima, logits[:, whole * BLOCK :].amax(1, keepdim=True)], dim=1)
    within = torch.arange(BLOCK, device=logits.device)
    # the last block may be shorter: its last entry again changes no maximum
    ids = (maxima.argmax(1, keepdim=True) * BLOCK + within).clamp_max_(size - 1)
    entries = logits.gather(1, ids)
    best = entries.argmax(1, keepdim=True)
    values = entries.gather(1, best).flatten()
    return torch.where(values.isfinite(), ids.gather(1, best).flatten(), 0), values


@op(is_invariant=True)
def draw(logits: Tensor, settings: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of logits [R, V] fp32 -> (ids [R] int64, peaks [R] fp32).

    settings [R, 4] fp64: temperature, top_k, top_p, min_p. Temperature 0 takes the largest entry.
    Otherwise the row is divided by it, min-p, top-k and top-p filter (`filters.survivors`), and one
    of those that stay is drawn: an exponential race, in which the token with the largest exp(l -
    peak) / waiting time wins, which is argmax(l + Gumbel noise); the lower id among equals. keys
    [R, 2] int32 and hashes [V] int32 are those of `noise`. Leaving out a token that would have lost
    does not change the result. A token at -inf never wins: the peak's score is at least 1 / 16.7,
    its own is 0. The peak is that of the divided row; a row without a finite one has the id 0.
    """
    ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    peaks = torch.empty(logits.shape[0], dtype=logits.dtype, device=logits.device)
    largest, plain, filtered = _kinds(settings.tolist())
    if largest:
        ids[largest], peaks[largest] = greedy(logits[largest])
    step = max(1, _ENTRIES_TOGETHER // logits.shape[1])
    for rows in (plain[i : i + step] for i in range(0, len(plain), step)):
        divided = logits[rows] / settings[rows, :1].to(logits.dtype)
        ids[rows], peaks[rows] = draw_rows(divided, hashes, keys[rows])
    for row in filtered:
        temperature, top_k, top_p, min_p = settings[row].tolist()
        divided_row = VocabRow(logits[row] / temperature)
        peaks[row] = divided_row.peak
        if math.isfinite(divided_row.peak):
            kept = survivors(divided_row, int(top_k), top_p, min_p)
            ids[row] = draw_row(divided_row, kept, hashes, keys[row])
    return ids, peaks


@op(is_invariant=True)
def truncate(logits: Tensor, settings: Tensor) -> Tensor:
    """Logits [R, V] fp32 as `draw` uses them: divided by the temperature, and -inf for all that
    the filters drop -> [R, V]. Temperature 0 and rows without a finite peak are not filtered.
    """
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings.tolist()):
        out[row] = logits[row] if temperature == 0.0 else logits[row] / temperature
        divided = VocabRow(out[row].clone())
        if temperature != 0.0 and math.isfinite(divided.peak):
            kept = survivors(divided, int(top_k), top_p, min_p)
            if kept is not None:
                out[row] = -math.inf
                out[row, kept] = divided.values[kept]
    return out


@op(is_invariant=True)
def rank(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogits:
    """Parts of the log-probabilities of a token [R] int64 of each row of logits [R, V] fp32, and
    of the num_top <= V largest entries.
    """
    rows = [VocabRow(row) for row in logits]
    tops = [row.top(num_top) for row in rows]
    own = logits.gather(1, token_ids[:, None]).flatten().tolist()
    shape, like = (len(rows), num_top), logits.new_empty(0)
    counts = [row.count_at_least(value) for row, value in zip(rows, own, strict=True)]
    return TopLogits(
        torch.stack(tops).to(torch.int32) if rows else like.new_empty(shape, dtype=torch.int32),
        torch.stack([row.values[top] for row, top in zip(rows, tops, strict=True)])
        if rows
        else like.new_empty(shape),
        like.new_tensor(counts, dtype=torch.int32),
        like.new_tensor([row.peak for row in rows]),
        like.new_tensor([row.log_sum() for row in rows]),
    )


def _kinds(settings: list[list[float]]) -> tuple[list[int], list[int], list[int]]:
    """Rows that take the largest, that draw from all, and that filter before."""
    largest: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        is_filtered = top_k > 0 or top_p < 1.0 or min_p > 0.0
        kind = largest if temperature == 0.0 else filtered if is_filtered else plain
        kind.append(row)
    return largest, plain, filtered


def draw_row(row: VocabRow, ids: Tensor | None, hashes: Tensor, key: Tensor) -> int:
    """Draw one token from softmax(row), restricted to `ids` [n] ascending (None: all).

    `row` has a finite peak. hashes [V] and key [2] int32 come from `noise`.
    """
    if ids is None:
        return VocabRow(_scores(row.values - row.peak, hashes, key)).first_max()
    return int(ids[_scores(row.values[ids] - row.peak, hashes[ids], key).argmax()])


def draw_rows(logits: Tensor, hashes: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`draw_row` without restriction for each row of logits [R, V], keys [R, 2].

    -> (ids [R] int64, peaks [R]); a row whose peak is not finite has no meaningful id. Bitwise the
    same as one by one, because everything but maxima is per entry.
    """
    peaks = logits.amax(1, keepdim=True)
    scores = _scores(logits - peaks, hashes, keys[:, :, None].unbind(1))
    return greedy(scores)[0], peaks.flatten()


def _scores(differences: Tensor, hashes: Tensor, key: Tensor | Sequence[Tensor]) -> Tensor:
    times = negative_waiting_times(noise_bits(hashes, key[0], key[1]))
    return differences.exp_().neg_().div_(times)
