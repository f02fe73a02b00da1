"""Ingredients of log-probabilities: see `quire.ops.sampling.sample.rank`."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dense, kernel, power_of_2
from quire.kernels.triton.sampling.chunks import (
    chunks_of,
    is_finite,
    largest,
    of_chunks,
    one_program,
    warps_of,
)
from quire.kernels.triton.sampling.cuts import is_kept, largest_reaching, nth_on, ordered, sum_from
from quire.ops.sampling.sample import TopLogits


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
    """For chunk program_id(1) of row program_id(0), its largest entry, the sum of exp(entry -
    that), and how many entries are at least the token's -> [R, chunks].
    """
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * V + at, at < V, other=float("-inf"))
    best, _ = largest(x, at, V)
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
    """Joins the results of the chunks of row program_id(0)."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    at = index * CHUNKS + chunk
    maximum = tl.load(maxima + at, inside, other=float("-inf"))
    peak, _ = largest(maximum, chunk, BLOCK)
    sum_of_chunk = tl.load(sums + at, inside, other=0.0)
    whole = tl.sum(sum_of_chunk * tl.exp(maximum - peak), 0)
    tl.store(peaks + index, peak)
    tl.store(log_sums + index, tl.where(is_finite(peak), tl.log(whole), float("nan")))
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


def rank(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogits:
    """See `quire.ops.sampling.sample.rank`."""
    logits = dense(logits)
    rows, width = logits.shape
    assert 0 <= num_top <= width
    peaks, log_sums = logits.new_empty(rows), logits.new_empty(rows)
    ranks = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        chunks, chunk = chunks_of(width)
        maxima, counts = of_chunks(logits, chunks)
        sums = torch.empty_like(maxima)
        _describe_kernel[(rows, chunks)](
            logits,
            dense(token_ids),
            maxima,
            sums,
            counts,
            V=width,
            CHUNK=chunk,
            num_warps=warps_of(chunk),
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


def _top(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids [R, n] int32 and values [R, n] of the largest entries, largest first. Zeros where a NaN
    leaves them open: an id is used as an index before somebody looks at the peak.
    """
    rows, width = logits.shape
    ids = logits.new_zeros(rows, num_top, dtype=torch.int32)
    values = logits.new_zeros(rows, num_top)
    if rows and num_top:
        _top_kernel[(rows,)](logits, ids, values, num_top, V=width, **one_program(width))
    # stable: of equal values the lowest id comes first
    values, order = values.sort(descending=True, stable=True)
    return ids.gather(1, order), values
