"""Products with a weight for each head: a head's columns of the rows times that head's weight."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dot_type, kernel, readable, shared_memory
from quire.kernels.triton.linear.product_kernel import finish_product, float_sums, is_below
from quire.kernels.triton.linear.product_tiles import (
    ProductShape,
    ProductTile,
    float32_tile,
    row_class,
    tile_of,
)
from quire.ops.mixers.latent import PlainHeads


@kernel
def _heads_product_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    T: int,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    X_TOKEN: tl.constexpr,
    X_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Rows of tile program_id(0) times outputs of tile program_id(1) of head program_id(2):
    x [T, H, C] and w [H, N, C] -> out [T, H, N].
    """
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < T, is_below(n, N, OUTPUTS)
    x_row = x + row * X_TOKEN + head * X_HEAD
    w_row = w + (head * N + n) * C
    y = float_sums(
        x_row, is_row, w_row, is_output, C, ROWS, OUTPUTS, DEPTH, STAGES, DOT, tl.float32
    )
    finish_product(
        y, out, out, out, out, row * H + head, n, is_row, is_output,
        N, HAS_BIAS=False, HAS_ADDEND=False,
    )  # fmt: skip


def pack_heads(weight: Tensor) -> PlainHeads:
    """See `quire.ops.mixers.latent.pack_heads`: a head's outputs follow each other."""
    return PlainHeads(weight.contiguous())


def heads_linear(x: Tensor, w: PlainHeads, *, is_fixed: bool) -> Tensor:
    """See `quire.ops.mixers.latent.heads_linear`. is_fixed: a row's bits must not depend on the
    number of rows.
    """
    num_tokens, heads, width = x.shape
    outputs = w.out_features
    assert (heads, width) == (w.heads, w.in_features)
    x = readable(x)
    out = x.new_empty(num_tokens, heads, outputs)
    if not num_tokens:
        return out
    dot = dot_type(x.dtype)
    tile = _tile(num_tokens, w, x, dot, is_fixed=is_fixed)
    _heads_product_kernel[(-(-num_tokens // tile.rows), -(-outputs // tile.outputs), heads)](
        x,
        w.weight,
        out,
        num_tokens,
        H=heads,
        N=outputs,
        C=width,
        X_TOKEN=x.stride(0),
        X_HEAD=x.stride(1),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        DOT=dot,
        num_warps=tile.warps,
    )
    return out


def _tile(num_rows: int, w: PlainHeads, x: Tensor, dot: Any, *, is_fixed: bool) -> ProductTile:
    shape = ProductShape(
        outputs=w.heads * w.out_features,
        bits=8 * w.weight.itemsize,
        x_bytes=x.itemsize,
        shared_memory=shared_memory(x.device),
    )
    if dot is tl.float32:
        return float32_tile(shape)
    return tile_of(row_class(num_rows, 1, is_fixed=is_fixed), shape)
