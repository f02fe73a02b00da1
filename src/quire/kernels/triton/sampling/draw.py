"""From logits to tokens: see `quire.ops.sampling.sample`.

Rows are cut into chunks, so that one row keeps a whole GPU busy, and a second kernel joins what
the chunks found. A row's result depends on the row alone.
"""

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
from quire.kernels.triton.sampling.race import (
    race_kernel,
    settle_kernel,
    truncate_kernel,
    weigh_kernel,
    window_kernel,
)
from quire.kernels.triton.sampling.window import MAX_WIDTH, few_of, open_entries, room_of, sample_of


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
) -> None:
    """The best of each row's chunks -> values and ids [R]; id 0 if the value is not finite."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    score = tl.load(scores + index * CHUNKS + chunk, inside, other=float("-inf"))
    best, first = largest(score, chunk, BLOCK)
    tl.store(values + index, best)
    is_found = is_finite(best) & (first < CHUNKS)
    found = tl.load(chunk_ids + index * CHUNKS + first, is_found, other=0)
    tl.store(ids + index, found.to(tl.int64))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.ops.sampling.sample.greedy`."""
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
        _join_kernel[(rows,)](
            scores, chunk_ids, values, ids, CHUNKS=chunks, BLOCK=power_of_2(chunks), num_warps=1
        )
    return ids, values


def draw(logits: Tensor, settings: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
    """See `quire.ops.sampling.sample.draw`."""
    logits = dense(logits)
    ids = logits.new_empty(len(logits), dtype=torch.int64)
    peaks, _, _ = _cut(logits, dense(settings), dense(keys), dense(hashes), ids)
    return ids, peaks


def truncate(logits: Tensor, settings: Tensor) -> Tensor:
    """See `quire.ops.sampling.sample.truncate`."""
    logits, settings = dense(logits), dense(settings)
    rows, width = logits.shape
    out = torch.empty_like(logits)
    _, lows, lasts = _cut(logits, settings)
    if rows:
        chunks, chunk = chunks_of(width)
        truncate_kernel[(rows, chunks)](
            logits, settings, lows, lasts, out, V=width, CHUNK=chunk, num_warps=warps_of(chunk)
        )
    return out


def _cut(
    logits: Tensor,
    settings: Tensor,
    keys: Tensor | None = None,
    hashes: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw `ids`, or find the lows and lasts [R] int32 for `is_kept` -> peaks [R] fp32 and those.

    Memory: 64 KiB for each row of a large vocabulary, for open entries.
    """
    rows, width = logits.shape
    assert width <= MAX_WIDTH, f"a row of {width} is too long to be cut"
    chunks, chunk = chunks_of(width)
    maxima, sure_counts = of_chunks(logits, chunks)
    sums = torch.empty_like(maxima)
    peaks, wholes = logits.new_empty(rows), logits.new_empty(rows)
    lows, highs, leasts, lasts = (logits.new_empty(rows, dtype=torch.int32) for _ in range(4))
    counts, entries = open_entries(logits)
    if not rows:
        return peaks, leasts, lasts
    of_row, of_chunk = {"V": width, **one_program(width)}, {"V": width, "CHUNK": chunk}
    joins = {"CHUNKS": chunks, "LANES": power_of_2(chunks)}
    warps = warps_of(chunk)
    weigh_kernel[(rows, chunks)](logits, settings, maxima, sums, **of_chunk, num_warps=warps)
    window_kernel[(rows,)](
        logits, settings, maxima, sums, peaks, wholes, lows, highs, counts,
        **of_row, **joins, SAMPLE=sample_of(width),
    )  # fmt: skip
    # what an op without draws does not read is any pointer
    noise = settings if keys is None else keys, settings if hashes is None else hashes
    found, scores, winners = (counts, entries), maxima, torch.empty_like(sure_counts)
    race_kernel[(rows, chunks)](
        logits, settings, *noise, peaks, lows, highs, *found, sure_counts, sums, scores, winners,
        **of_chunk, ROOM=room_of(width), DRAWS=ids is not None, num_warps=2 * warps,
    )  # fmt: skip
    settle_kernel[(rows,)](
        logits, settings, *noise, peaks, wholes, lows, highs, *found, sure_counts, sums, scores,
        winners, lasts, leasts if ids is None else ids,
        **of_row, **joins, FEW=few_of(width), ROOM=room_of(width), DRAWS=ids is not None,
    )  # fmt: skip
    return peaks, leasts, lasts
