"""Sums of prompts' tokens, for pooling by the mean: the op `sum_chunks`."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import columns_of, dense, kernel
from quire.ops.mixers.pooling import SPAN


@kernel
def _sum_chunks_kernel(
    x: tl.tensor,
    chunks: tl.tensor,
    spans: tl.tensor,
    rest: tl.tensor,
    C: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Columns program_id(1) of the sums of chunk program_id(0), token after token."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    start = tl.load(chunks + chunk * 3)
    first = tl.load(chunks + chunk * 3 + 1)
    count = tl.load(chunks + chunk * 3 + 2)
    whole = tl.load(spans + chunk * C + column, inside, other=0.0)
    part = tl.load(rest + chunk * C + column, inside, other=0.0)
    token = start
    while token < start + count:
        part += tl.load(x + token * C + column, inside, other=0.0).to(part.dtype)
        token += 1
        is_end = (first + token - start) % SPAN == 0
        whole = tl.where(is_end, whole + part, whole)
        part = tl.where(is_end, 0.0, part)
    tl.debug_barrier()  # all threads have read the sums
    tl.store(spans + chunk * C + column, whole, inside)
    tl.store(rest + chunk * C + column, part, inside)


def sum_chunks(x: Tensor, chunks: Tensor, spans: Tensor, rest: Tensor) -> None:
    """See `quire.ops.mixers.pooling.sum_chunks`; chunks on the device, and nobody waits for it."""
    x = dense(x)
    assert chunks.is_contiguous() and spans.is_contiguous() and rest.is_contiguous()
    if spans.numel():
        blocks, block = columns_of(spans.shape[1])
        _sum_chunks_kernel[(len(chunks), blocks)](
            x, chunks, spans, rest, C=spans.shape[1], SPAN=SPAN, BLOCK=block
        )
