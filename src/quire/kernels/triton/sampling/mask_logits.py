"""Taking tokens that a grammar forbids out of the logits."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dense, kernel, power_of_2

_CHUNK = 4096


@kernel
def _mask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    mask: tl.tensor,
    num_rows: int,
    stride: int,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Chunk program_id(1) of the row that mask program_id(0) is for."""
    entry = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(rows + entry)
    width: tl.constexpr = (V + 31) // 32
    words = tl.load(mask + entry.to(tl.int64) * width + at // 32, at < V, other=-1)
    is_forbidden = ((words >> (at % 32)) & 1) == 0
    if (row >= 0) & (row < num_rows):
        to = logits + row * stride + at
        tl.store(to, float("-inf"), (at < V) & is_forbidden)


def mask_logits(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """See `quire.ops.sampling.grammar_mask.mask_logits`. A row that does not exist is left alone:
    to raise, the host would have to wait for the device.
    """
    num_rows, width = logits.shape
    assert logits.stride(1) == 1
    if not len(rows):
        return
    chunk = min(_CHUNK, power_of_2(width))
    _mask_kernel[(len(rows), -(-width // chunk))](
        logits,
        dense(rows),
        dense(mask),
        num_rows,
        logits.stride(0),
        V=width,
        CHUNK=chunk,
        num_warps=4,
    )
