"""The kernels of a draw: weigh the rows, guess where their cuts lie, race, settle the open entries.

Two reads of the logits and two small kernels between and after them, whatever the settings.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl

from quire.kernels.triton.launch import kernel
from quire.kernels.triton.sampling.chunks import is_finite, largest
from quire.kernels.triton.sampling.cuts import (
    block_of,
    floor_of,
    is_kept,
    number,
    ordered,
    searched,
    sum_from,
)
from quire.kernels.triton.sampling.window import (
    collect,
    id_of,
    key_of,
    sample_of_row,
    settle,
    window_of_k,
    window_of_p,
)


@kernel
def _is_cut(setting: tl.tensor, V: tl.constexpr) -> Any:
    """Whether top-k or top-p of these settings can drop something."""
    top_k, top_p = tl.load(setting + 1), tl.load(setting + 2)
    return (tl.load(setting) > 0.0) & (((top_k > 0.0) & (top_k < V)) | (top_p < 1.0))


@kernel
def weigh_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The largest entry of chunk program_id(1) of row program_id(0) and, where the row is cut, the
    sum of exp(entry - that), both divided by the temperature -> [R, chunks].
    """
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    best, _ = largest(x, at, V)
    to = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima + to, best)
    if _is_cut(settings + index * 4, V):
        temperature = tl.load(settings + index * 4).to(tl.float32)
        shift = tl.where(best == float("-inf"), 0.0, tl.div_rn(best, temperature))
        tl.store(sums + to, tl.sum(tl.exp(tl.div_rn(x, temperature) - shift), 0))


@kernel
def window_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    wholes: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    counts: tl.tensor,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """For row program_id(0), the largest entry, divided; what the entries weigh that min-p leaves;
    from which key on they are open and from which on they surely stay; none is collected yet.
    """
    index = tl.program_id(0).to(tl.int64)
    setting = settings + index * 4
    chunk = tl.arange(0, LANES)
    at = index * CHUNKS + chunk
    maximum = tl.load(maxima + at, chunk < CHUNKS, other=float("-inf"))
    best, _ = largest(maximum, chunk, LANES)
    chosen = tl.load(setting).to(tl.float32)
    temperature = tl.where(chosen == 0.0, 1.0, chosen)
    peak = tl.div_rn(best, temperature)
    top_k, top_p, min_p = tl.load(setting + 1), tl.load(setting + 2), tl.load(setting + 3)
    low, high = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)
    whole = tl.zeros((), tl.float32)
    if (chosen > 0.0) & is_finite(peak):
        floor = floor_of(peak, min_p)
        if _is_cut(setting, V):
            sample = sample_of_row(logits + index * V, temperature, V, SAMPLE)
            if (top_k > 0.0) & (top_k < V):
                low, high = window_of_k(sample, top_k, V, SAMPLE)
                # top-p is a share of what top-k leaves, so that all of that must be collected
                high = tl.where(top_p < 1.0, 0xFFFFFFFF, high).to(tl.uint32)
            else:
                weight = tl.exp(tl.div_rn(maximum, temperature) - peak)
                weight *= tl.load(sums + at, chunk < CHUNKS, other=0.0)
                whole = tl.sum(weight, 0)
                if min_p > 0.0:
                    row = logits + index * V
                    whole = sum_from(row, temperature, peak, floor, V, BLOCK, True)
                low, high = window_of_p(sample, peak, whole, top_p, V, SAMPLE)
        low = tl.maximum(low, floor)
        high = tl.maximum(high, low)
    tl.store(peaks + index, peak)
    tl.store(wholes + index, whole)
    tl.store(lows + index, low.to(tl.int32, bitcast=True))
    tl.store(highs + index, high.to(tl.int32, bitcast=True))
    # the race adds to it
    tl.store(counts + index, 0)


@kernel
def _waiting_time(word: tl.tensor, a: tl.tensor, b: tl.tensor) -> Any:
    """The time of `quire.ops.sampling.noise`, given mix(token) and the key words of a row."""
    x = (word ^ a).to(tl.uint32, bitcast=True) * 0x7FEB352D
    x = (x ^ (x >> 15)) * b.to(tl.uint32, bitcast=True)
    bits = (x & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    v = tl.maximum((bits.to(tl.float32) + 0.5) * -(2.0**-31), -(1.0 - 2.0**-24))
    # log1p: where 1 + v is rounded, log's error is the same factor in v / ((1 + v) - 1)
    u = 1.0 + v
    exact = u == 1.0
    return -tl.where(exact, v, tl.log(u) * (v / tl.where(exact, 1.0, u - 1.0)))


@kernel
def race_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    keys: tl.tensor,
    hashes: tl.tensor,
    peaks: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    counts: tl.tensor,
    entries: tl.tensor,
    sure_counts: tl.tensor,
    sure_weights: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    DRAWS: tl.constexpr,
) -> None:
    """For chunk program_id(1) of row program_id(0), the winner (DRAWS), which is the largest entry
    where the temperature is 0, else of those that surely stay the one with the largest exp(l -
    peak) / time; how many these are and what they weigh; and the open entries, collected.
    """
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    to = index * tl.num_programs(1) + tl.program_id(1)
    temperature = tl.load(settings + index * 4).to(tl.float32)
    score = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    if temperature > 0.0:
        x = tl.div_rn(score, temperature)
        key = ordered(x)
        high = tl.load(highs + index).to(tl.uint32, bitcast=True)
        is_sure = (key >= high) & (at < V)
        weight = tl.exp(x - tl.load(peaks + index))
        if DRAWS:
            word = tl.load(hashes + at, at < V, other=0)
            a, b = tl.load(keys + index * 2), tl.load(keys + index * 2 + 1)
            score = tl.where(is_sure, weight / _waiting_time(word, a, b), float("-inf"))
        if _is_cut(settings + index * 4, V):
            low = tl.load(lows + index).to(tl.uint32, bitcast=True)
            is_open = (key >= low) & (key < high) & (at < V)
            collect(key, at, is_open, counts + index, entries + index * ROOM, ROOM)
            tl.store(sure_counts + to, tl.sum(is_sure.to(tl.int32), 0))
            tl.store(sure_weights + to, tl.sum(tl.where(is_sure, weight, 0.0), 0))
    if DRAWS:
        best, found = largest(score, at, V)
        tl.store(scores + to, best)
        tl.store(ids + to, found)


@kernel
def _settled(
    setting: tl.tensor,
    entries: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    sure_count: tl.tensor,
    sure_weight: tl.tensor,
    peak: tl.tensor,
    whole: tl.tensor,
    hashes: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    DRAWS: tl.constexpr,
) -> Any:
    """Whether the sample was right; if so, what stays, for `is_kept`, and the winner of the open
    ones that stay and its score.
    """
    lane = tl.arange(0, SIZE)
    top_k, top_p, min_p = tl.load(setting + 1), tl.load(setting + 2), tl.load(setting + 3)
    floor = floor_of(peak, min_p)
    entry = tl.load(entries + lane, lane < count, other=0)
    least, is_right = settle(
        entry, count, floor, low, high, sure_count, sure_weight, peak, whole, top_k, top_p, V, SIZE
    )
    last = tl.where(top_p < 1.0, id_of(least), V)
    stays = (lane < count) & (entry >= least)
    id = id_of(entry)
    score = tl.full((SIZE,), float("-inf"), tl.float32)
    if DRAWS:
        word = tl.load(hashes + id, stays, other=0)
        weight = tl.exp(number(key_of(entry)) - peak)
        score = tl.where(stays, weight / _waiting_time(word, a, b), float("-inf"))
    best, found = largest(score, tl.where(stays, id, V), V)
    return is_right, key_of(least), last, best, found


@kernel
def _race(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    last: tl.tensor,
    hashes: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Score and id of the winner of a whole row."""
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.zeros((), tl.int32) + V
    for start in range(0, V, BLOCK):
        at, x, key = block_of(row, start, temperature, V, BLOCK)
        word = tl.load(hashes + at, at < V, other=0)
        stays = is_kept(key, at, low, last) & (at < V)
        score = tl.where(stays, tl.exp(x - peak) / _waiting_time(word, a, b), float("-inf"))
        best_here, found = largest(score, at, V)
        # only if it is larger: of equal scores the lowest id wins, and blocks come in order
        winner = tl.where(best_here > best, found, winner)
        best = tl.maximum(best, best_here)
    return best, winner


@kernel
def settle_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    keys: tl.tensor,
    hashes: tl.tensor,
    peaks: tl.tensor,
    wholes: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    counts: tl.tensor,
    entries: tl.tensor,
    sure_counts: tl.tensor,
    sure_weights: tl.tensor,
    scores: tl.tensor,
    chunk_ids: tl.tensor,
    lasts: tl.tensor,
    ids: tl.tensor,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    FEW: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
) -> None:
    """Row program_id(0): the token drawn -> ids [R] (DRAWS), or what stays, for `is_kept`:
    the lows -> ids and the lasts [R].
    """
    index = tl.program_id(0).to(tl.int64)
    setting = settings + index * 4
    peak = tl.load(peaks + index)
    chunk = tl.arange(0, LANES)
    inside = chunk < CHUNKS
    at = index * CHUNKS + chunk
    low = tl.load(lows + index).to(tl.uint32, bitcast=True)
    last = tl.zeros((), tl.int32) + V
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.zeros((), tl.int32) + V
    a, b = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if DRAWS:
        a, b = tl.load(keys + index * 2), tl.load(keys + index * 2 + 1)
        best, first = largest(tl.load(scores + at, inside, other=float("-inf")), chunk, CHUNKS)
        winner = tl.load(chunk_ids + index * CHUNKS + first, first < CHUNKS, other=V)
    if _is_cut(setting, V) & is_finite(peak):
        high = tl.load(highs + index).to(tl.uint32, bitcast=True)
        count = tl.load(counts + index)
        whole = tl.load(wholes + index).to(tl.float64)
        sure_count = tl.sum(tl.load(sure_counts + at, inside, other=0), 0)
        sure_weight = tl.sum(tl.load(sure_weights + at, inside, other=0.0).to(tl.float64), 0)
        here = entries + index * ROOM
        # false as a tensor: so it stays if there are more open entries than there is room for
        is_right = count < 0
        least, open_best, open_winner = low, best, winner
        if count <= FEW:
            is_right, least, last, open_best, open_winner = _settled(
                setting, here, count, low, high, sure_count, sure_weight, peak, whole,
                hashes, a, b, V, FEW, DRAWS,
            )  # fmt: skip
        elif count <= ROOM:
            is_right, least, last, open_best, open_winner = _settled(
                setting, here, count, low, high, sure_count, sure_weight, peak, whole,
                hashes, a, b, V, ROOM, DRAWS,
            )  # fmt: skip
        low = least
        if is_right:
            is_better = (open_best > best) | ((open_best == best) & (open_winner < winner))
            winner = tl.where(is_better, open_winner, winner)
        else:
            row = logits + index * V
            temperature = tl.load(setting).to(tl.float32)
            floor = floor_of(peak, tl.load(setting + 3))
            top_k, top_p = tl.load(setting + 1), tl.load(setting + 2)
            low, last = searched(row, temperature, peak, floor, top_k, top_p, V, BLOCK)
            if DRAWS:
                _, winner = _race(row, temperature, peak, low, last, hashes, a, b, V, BLOCK)
    if DRAWS:
        tl.store(ids + index, tl.where(is_finite(peak) & (winner < V), winner, 0).to(tl.int64))
    else:
        tl.store(ids + index, low.to(tl.int32, bitcast=True))
        tl.store(lasts + index, last)


@kernel
def truncate_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    lows: tl.tensor,
    lasts: tl.tensor,
    out: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Chunk program_id(1) of row program_id(0), divided, -inf where an entry does not stay."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(settings + index * 4).to(tl.float32)
    x = tl.load(logits + index * V + at, at < V, other=0.0)
    x = tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))
    low = tl.load(lows + index).to(tl.uint32, bitcast=True)
    kept = is_kept(ordered(x), at, low, tl.load(lasts + index))
    tl.store(out + index * V + at, tl.where(kept, x, float("-inf")), at < V)
