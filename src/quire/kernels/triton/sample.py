"""From logits to tokens: see `quire.ops.sample`.

Rows are cut into chunks, so that one row keeps a whole GPU busy, and a second kernel joins what
the chunks found. No atomics: a row's result depends on the row alone.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.chunks import (
    chunks_of,
    is_finite,
    largest,
    of_chunks,
    one_program,
    warps_of,
)
from quire.kernels.triton.cuts import cut_kernel, is_kept, ordered
from quire.kernels.triton.launch import dense, kernel, power_of_2


@kernel
def _chunk_kernel(
    logits: tl.tensor, scores: tl.tensor, ids: tl.tensor, V: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """The largest entry of chunk program_id(1) of row program_id(0): scores, ids [R, chunks]."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    best, found = largest(x, at, V)
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
    best, first = largest(score, chunk, BLOCK)
    if HAS_VALUES:
        best = tl.load(values + index)
    else:
        tl.store(values + index, best)
    is_found = is_finite(best) & (first < CHUNKS)
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
    best, found = largest(score, at, V)
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


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.ops.sample.greedy`."""
    logits = dense(logits)
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)
    values = logits.new_empty(rows)
    if rows:
        chunks, chunk = chunks_of(width)
        scores, chunk_ids = of_chunks(logits, chunks)
        _chunk_kernel[(rows, chunks)](
            logits, scores, chunk_ids, V=width, CHUNK=chunk, num_warps=warps_of(chunk)
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
        chunks, chunk = chunks_of(width)
        scores, chunk_ids = of_chunks(logits, chunks)
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
            num_warps=warps_of(chunk),
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
        chunks, chunk = chunks_of(width)
        _truncate_kernel[(rows, chunks)](
            logits,
            dense(settings),
            lows,
            lasts,
            out,
            V=width,
            CHUNK=chunk,
            num_warps=warps_of(chunk),
        )
    return out


def _cut(logits: Tensor, settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Peaks [R] fp32, and lows and lasts [R] int32 for `is_kept`."""
    rows, width = logits.shape
    _, maxima = greedy(logits)
    peaks = torch.empty_like(maxima)
    lows, lasts = (logits.new_empty(rows, dtype=torch.int32) for _ in range(2))
    if rows:
        cut_kernel[(rows,)](
            logits,
            dense(settings),
            maxima,
            peaks,
            lows,
            lasts,
            V=width,
            **one_program(width),
        )
    return peaks, lows, lasts


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
