"""From logits to tokens and what their log-probabilities need: see `quire.ops.sample`.

Rows are cut into chunks, so that one row keeps a whole GPU busy, and a second kernel joins what
the chunks found. No atomics: a row's result depends on the row alone.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.cuts import (
    cut_kernel,
    is_kept,
    largest_reaching,
    nth_on,
    ordered,
    sum_from,
)
from quire.kernels.triton.launch import dense, kernel, power_of_2
from quire.ops.sample import TopLogits

_CHUNK = 4096
"""Entries of a program where many programs share a row."""

_BLOCK = 2048
"""Entries at a time where a program has the whole row: 16 sums of each lane are in registers."""


@kernel
def _largest(score: tl.tensor, at: tl.tensor, V: tl.constexpr) -> Any:
    """The largest score and the lowest id that has it; the score is NaN where there is a NaN."""
    best = tl.max(tl.where(score == score, score, float("-inf")), 0)
    index = tl.min(tl.where(score == best, at, V), 0)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    return tl.where(has_nan, float("nan"), best), index


@kernel
def _is_finite(x: tl.tensor) -> Any:
    return (x == x) & (tl.abs(x) != float("inf"))


@kernel
def _chunk_kernel(
    logits: tl.tensor, scores: tl.tensor, ids: tl.tensor, V: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """The largest entry of chunk program_id(1) of row program_id(0): scores, ids [R, chunks]."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    best, found = _largest(x, at, V)
    to = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + to, best)
    tl.store(ids + to, found)


@kernel
def _join_kernel(
    scores: tl.tensor,
    chunk_ids: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_VALUES: tl.constexpr,
) -> None:
    """The best of each row's chunks -> values (unless they are there) and ids [R]; the id 0 where
    the value is not finite.
    """
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    score = tl.load(scores + index * CHUNKS + chunk, inside, other=float("-inf"))
    best, first = _largest(score, chunk, BLOCK)
    if HAS_VALUES:
        best = tl.load(values + index)
    else:
        tl.store(values + index, best)
    is_found = _is_finite(best) & (first < CHUNKS)
    found = tl.load(chunk_ids + index * CHUNKS + first, is_found, other=0)
    tl.store(ids + index, found.to(tl.int64))


@kernel
def _waiting_time(word: tl.tensor, a: tl.tensor, b: tl.tensor) -> Any:
    """The time of `quire.ops.noise`, given mix(token) and the key words of a row."""
    x = (word ^ a).to(tl.uint32, bitcast=True) * 0x7FEB352D
    x = (x ^ (x >> 15)) * b.to(tl.uint32, bitcast=True)
    bits = (x & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    v = tl.maximum((bits.to(tl.float32) + 0.5) * -(2.0**-31), -(1.0 - 2.0**-24))
    # log1p: where 1 + v is rounded, log's error is the same factor in v / ((1 + v) - 1)
    u = 1.0 + v
    exact = u == 1.0
    return -tl.where(exact, v, tl.log(u) * (v / tl.where(exact, 1.0, u - 1.0)))


@kernel
def _race_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    keys: tl.tensor,
    hashes: tl.tensor,
    peaks: tl.tensor,
    lows: tl.tensor,
    lasts: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The winner of chunk program_id(1) of row program_id(0): the largest entry where the
    temperature is 0, else of those that stay the one with the largest exp(l - peak) / time.
    """
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(settings + index * 4).to(tl.float32)
    score = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    if temperature > 0.0:
        x = tl.div_rn(score, temperature)
        low = tl.load(lows + index).to(tl.uint32, bitcast=True)
        kept = is_kept(ordered(x), at, low, tl.load(lasts + index)) & (at < V)
        word = tl.load(hashes + at, at < V, other=0)
        a, b = tl.load(keys + index * 2), tl.load(keys + index * 2 + 1)
        weight = tl.exp(x - tl.load(peaks + index))
        score = tl.where(kept, weight / _waiting_time(word, a, b), float("-inf"))
    best, found = _largest(score, at, V)
    to = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + to, best)
    tl.store(ids + to, found)


@kernel
def _truncate_kernel(
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


@kernel
def _describe_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Of chunk program_id(1) of row program_id(0): its largest entry, the sum of exp(entry - that),
    and how many entries are at least the token's -> [R, chunks].
    """
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    best, _ = _largest(x, at, V)
    own = tl.load(logits + index * V + tl.load(token_ids + index))
    shift = tl.where(best == float("-inf"), 0.0, best)
    to = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima + to, best)
    tl.store(sums + to, tl.sum(tl.exp(x - shift), 0))
    tl.store(counts + to, tl.sum(((x >= own) & (at < V)).to(tl.int32), 0))


@kernel
def _join_descriptions_kernel(
    maxima: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    peaks: tl.tensor,
    log_sums: tl.tensor,
    ranks: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """What the chunks of row program_id(0) found, joined."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    at = index * CHUNKS + chunk
    maximum = tl.load(maxima + at, inside, other=float("-inf"))
    peak, _ = _largest(maximum, chunk, BLOCK)
    sum_of_chunk = tl.load(sums + at, inside, other=0.0)
    whole = tl.sum(sum_of_chunk * tl.exp(maximum - peak), 0)
    tl.store(peaks + index, peak)
    tl.store(log_sums + index, tl.where(_is_finite(peak), tl.log(whole), float("nan")))
    tl.store(ranks + index, tl.sum(tl.load(counts + at, inside, other=0), 0))


@kernel
def _top_kernel(
    logits: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    num_top: int,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The num_top largest entries of row program_id(0), in the order of their ids."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * V
    one = tl.full((), 1.0, tl.float32)
    none = tl.zeros((), tl.uint32)
    wanted = tl.zeros((), tl.float64) + num_top
    low = largest_reaching(row, one, one, none, wanted, V, BLOCK, False)
    above = sum_from(row, one, one, low + 1, V, BLOCK, False)
    last = nth_on(row, one, low, num_top - above.to(tl.int32), V, BLOCK)
    seen = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, at < V, other=float("-inf"))
        kept = (is_kept(ordered(x), at, low, last) & (at < V)).to(tl.int32)
        place = seen + tl.cumsum(kept, 0) - 1
        is_stored = (kept > 0) & (place < num_top)
        to = index * num_top + place
        tl.store(ids + to, at, is_stored)
        tl.store(values + to, x, is_stored)
        seen += tl.sum(kept, 0)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.ops.sample.greedy`."""
    logits = dense(logits)
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)
    values = logits.new_empty(rows)
    if rows:
        chunks, chunk = _chunks(width)
        scores, chunk_ids = _found(logits, chunks)
        _chunk_kernel[(rows, chunks)](
            logits, scores, chunk_ids, V=width, CHUNK=chunk, num_warps=_warps(chunk)
        )
        _join(scores, chunk_ids, values, ids, has_values=False)
    return ids, values


def draw(logits: Tensor, settings: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.ops.sample.draw`."""
    logits = dense(logits)
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)
    peaks, lows, lasts = _cut(logits, settings)
    if rows:
        chunks, chunk = _chunks(width)
        scores, chunk_ids = _found(logits, chunks)
        _race_kernel[(rows, chunks)](
            logits,
            dense(settings),
            dense(keys),
            dense(hashes),
            peaks,
            lows,
            lasts,
            scores,
            chunk_ids,
            V=width,
            CHUNK=chunk,
            num_warps=_warps(chunk),
        )
        _join(scores, chunk_ids, peaks, ids, has_values=True)
    return ids, peaks


def truncate(logits: Tensor, settings: Tensor) -> Tensor:
    """See `quire.ops.sample.truncate`."""
    logits = dense(logits)
    rows, width = logits.shape
    out = torch.empty_like(logits)
    _, lows, lasts = _cut(logits, settings)
    if rows:
        chunks, chunk = _chunks(width)
        _truncate_kernel[(rows, chunks)](
            logits,
            dense(settings),
            lows,
            lasts,
            out,
            V=width,
            CHUNK=chunk,
            num_warps=_warps(chunk),
        )
    return out


def rank(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogits:
    """See `quire.ops.sample.rank`."""
    logits = dense(logits)
    rows, width = logits.shape
    assert 0 <= num_top <= width
    peaks, log_sums = logits.new_empty(rows), logits.new_empty(rows)
    ranks = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        chunks, chunk = _chunks(width)
        maxima, counts = _found(logits, chunks)
        sums = torch.empty_like(maxima)
        _describe_kernel[(rows, chunks)](
            logits,
            dense(token_ids),
            maxima,
            sums,
            counts,
            V=width,
            CHUNK=chunk,
            num_warps=_warps(chunk),
        )
        _join_descriptions_kernel[(rows,)](
            maxima,
            sums,
            counts,
            peaks,
            log_sums,
            ranks,
            CHUNKS=chunks,
            BLOCK=power_of_2(chunks),
            num_warps=1,
        )
    return TopLogits(*_top(logits, num_top), ranks, peaks, log_sums)


def _cut(logits: Tensor, settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Peaks [R] fp32, and lows and lasts [R] int32 for `is_kept`."""
    rows, width = logits.shape
    _, largest = greedy(logits)
    peaks = torch.empty_like(largest)
    lows, lasts = (logits.new_empty(rows, dtype=torch.int32) for _ in range(2))
    if rows:
        block = min(_BLOCK, power_of_2(width))
        cut_kernel[(rows,)](
            logits,
            dense(settings),
            largest,
            peaks,
            lows,
            lasts,
            V=width,
            BLOCK=block,
            num_warps=_warps_of_row(block),
        )
    return peaks, lows, lasts


def _top(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids [R, n] int32 and values [R, n] of the largest entries, largest first. Zeros where a NaN
    leaves them open: an id is used as an index before somebody looks at the peak.
    """
    rows, width = logits.shape
    ids = logits.new_zeros(rows, num_top, dtype=torch.int32)
    values = logits.new_zeros(rows, num_top)
    if rows and num_top:
        block = min(_BLOCK, power_of_2(width))
        warps = _warps_of_row(block)
        _top_kernel[(rows,)](logits, ids, values, num_top, V=width, BLOCK=block, num_warps=warps)
    values, order = values.sort(descending=True, stable=True)
    return ids.gather(1, order), values


def _join(
    scores: Tensor, chunk_ids: Tensor, values: Tensor, ids: Tensor, *, has_values: bool
) -> None:
    rows, chunks = scores.shape
    _join_kernel[(rows,)](
        scores,
        chunk_ids,
        values,
        ids,
        CHUNKS=chunks,
        BLOCK=power_of_2(chunks),
        HAS_VALUES=has_values,
        num_warps=1,
    )


def _chunks(width: int) -> tuple[int, int]:
    """How many chunks a row has, and of how many entries."""
    chunk = min(_CHUNK, power_of_2(width))
    return -(-width // chunk), chunk


def _found(logits: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Room for a float and an integer of each chunk, [R, chunks]."""
    shape = (logits.shape[0], chunks)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def _warps(chunk: int) -> int:
    return min(8, max(1, chunk // 512))


def _warps_of_row(block: int) -> int:
    return min(16, max(1, block // 128))
