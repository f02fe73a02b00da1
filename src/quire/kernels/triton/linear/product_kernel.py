"""The kernel of products: rows times a weight [(E,) out, in] that is floats or small integers.

A program multiplies the transposed product, outputs [OUTPUTS, DEPTH] times rows [DEPTH, ROWS]:
weights are then the operand that tensor cores take from registers, where they are widened, each by
one thread.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl

from quire.kernels.triton.launch import kernel
from quire.kernels.triton.linear.nibbles import two_scales, widened


@kernel
def rows_of_program(
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    T: int,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
) -> Any:
    """The expert of tile program_id(0), the rows of the output, of the input, and which exist."""
    tile = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    if GROUPED:
        at = tl.load(starts + tile) + lane
        is_row = at < tl.load(ends + tile)
        target = tl.load(order + at, is_row, other=0).to(tl.int64)
        return tl.load(experts + tile).to(tl.int64), target, target // SHARED, is_row
    else:  # a second path for the compiler, not for Python
        target = tile.to(tl.int64) * ROWS + lane
        return tl.zeros((), tl.int64), target, target, target < T


@kernel
def is_below(at: tl.tensor, END: tl.constexpr, STEP: tl.constexpr) -> Any:
    """at < END, for numbers of whole steps: where they end with a step, the compiler knows it."""
    if END % STEP == 0:
        return tl.full(at.shape, 1, tl.int1)
    else:  # a second path for the compiler, not for Python
        return at < END


@kernel
def inputs_of(
    x_row: tl.tensor, is_row: tl.tensor, c: tl.tensor, is_input: tl.tensor, DOT: tl.constexpr
) -> Any:
    """Inputs c [DEPTH] of the rows that begin at x_row [ROWS] -> [DEPTH, ROWS]."""
    is_there = is_input[:, None] & is_row[None, :]
    return tl.load(x_row[None, :] + c[:, None], is_there, other=0.0).to(DOT)


@kernel
def float_sums(
    x_row: tl.tensor,
    is_row: tl.tensor,
    w_row: tl.tensor,
    is_output: tl.tensor,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
) -> Any:
    """Weights of the outputs that begin at w_row [OUTPUTS] times rows that begin at x_row [ROWS]:
    [OUTPUTS, ROWS] of type SUM.
    """
    sums = tl.zeros((OUTPUTS, ROWS), SUM)
    for start in tl.range(0, C, DEPTH, num_stages=STAGES):
        c = start + tl.arange(0, DEPTH)
        is_input = is_below(c, C, DEPTH)
        is_there = is_output[:, None] & is_input[None, :]
        w_tile = tl.load(w_row[:, None] + c[None, :], is_there, other=0.0)
        x_tile = inputs_of(x_row, is_row, c, is_input, DOT)
        sums = tl.dot(w_tile.to(DOT), x_tile, sums, input_precision="ieee", out_dtype=SUM)
    return sums


@kernel
def _int4_sums(
    x_row: tl.tensor,
    is_row: tl.tensor,
    w_row: tl.tensor,
    scale_at: tl.tensor,
    is_output: tl.tensor,
    N: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ROUNDED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    PTX: tl.constexpr,
) -> Any:
    """The same for pairs of groups (`quire.kernels.triton.linear.nibbles`), whose sums of type SUM
    are multiplied with their scales and added in fp32. scale_at [OUTPUTS]: where the first pair's
    are.
    """
    pairs: tl.constexpr = (C + 2 * GROUP - 1) // (2 * GROUP)
    step: tl.constexpr = DEPTH // (2 * GROUP)
    lane = tl.arange(0, GROUP)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in tl.range(0, pairs, step, num_stages=STAGES):
        for i in tl.static_range(step):
            c = (first + i) * (2 * GROUP) + lane
            is_there = is_output
            if pairs % step:
                is_there = is_output & (first + i < pairs)
            b_at = w_row[:, None] + ((first + i) * GROUP + lane)[None, :]
            b = tl.load(b_at, is_there[:, None], other=0)
            scale = two_scales(tl.load(scale_at + (first + i) * N, is_there, other=0))
            halves = widened(b, DOT, ROUNDED, PTX)
            for half in tl.static_range(2):
                is_input = is_below(c + half * GROUP, C, DEPTH)
                x_tile = inputs_of(x_row, is_row, c + half * GROUP, is_input, DOT)
                part = tl.dot(halves[half], x_tile, input_precision="ieee", out_dtype=SUM)
                sums += part.to(tl.float32) * scale[half][:, None]
    return sums


@kernel
def finish_product(
    y: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    addend: tl.tensor,
    addend_rows: tl.tensor,
    target: tl.tensor,
    n: tl.tensor,
    is_row: tl.tensor,
    is_output: tl.tensor,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
) -> None:
    """y [OUTPUTS, ROWS], with what is added to it, into rows `target` and columns n of out."""
    if HAS_BIAS:
        y += tl.load(bias + n, is_output, other=0.0).to(tl.float32)[:, None]
    if HAS_ADDEND:
        which = tl.load(addend_rows + target, is_row, other=-1).to(tl.int64)
        has_one = is_output[:, None] & (which >= 0)[None, :]
        added = tl.load(addend + which[None, :] * N + n[:, None], has_one, other=0.0)
        # rows without one keep their bits: -0 plus 0 would be 0
        y = tl.where(has_one, y + added, y)
    to = out + target[None, :] * N + n[:, None]
    tl.store(to, y.to(out.dtype.element_ty), is_output[:, None] & is_row[None, :])


@kernel
def product_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    addend: tl.tensor,
    addend_rows: tl.tensor,
    T: int,
    N: tl.constexpr,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    STORED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Rows of tile program_id(0) times outputs of tile program_id(1) of w [(E,) N, C]. Rows of x,
    and outputs of w that are not int4, are STRIDE apart.

    STORED: "float", "int8" or "fp8" (scales [(E,) N]), or "int4" (scales [(E,) P, N]). ROUNDED: x
    is numbers of the same kind with row_scales. GROUPED: rows are pairs, `SHARED` of which read the
    same row of x; a program without any reads no weights. HAS_ADDEND: to row t of y, row
    addend_rows[t] of addend [*, N] fp32 is added where that is not negative. DOT, SUM: the types of
    operands, and of their sums.
    """
    # the grid is made for the most tiles that a choice of experts can have
    if GROUPED and tl.load(starts + tl.program_id(0)) >= tl.load(ends + tl.program_id(0)):
        return
    expert, target, source, is_row = rows_of_program(
        order, experts, starts, ends, T, GROUPED, SHARED, ROWS
    )
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = is_below(n, N, OUTPUTS)
    x_row = x + source * STRIDE
    if STORED == "int4":
        pairs: tl.constexpr = (C + 2 * GROUP - 1) // (2 * GROUP)
        w_row = w + (expert * N + n) * (pairs * GROUP)
        scale_at = scales + expert * (pairs * N) + n
        y = _int4_sums(
            x_row, is_row, w_row, scale_at, is_output,
            N, C, GROUP, ROWS, OUTPUTS, DEPTH, STAGES, ROUNDED, DOT, SUM, PTX,
        )  # fmt: skip
    else:
        w_row = w + (expert * N + n) * STRIDE
        y = float_sums(x_row, is_row, w_row, is_output, C, ROWS, OUTPUTS, DEPTH, STAGES, DOT, SUM)
        y = y.to(tl.float32)
    if STORED == "int8" or STORED == "fp8":
        y *= tl.load(scales + expert * N + n, is_output, other=0.0)[:, None]
    if ROUNDED:
        y *= tl.load(row_scales + source, is_row, other=0.0)[None, :]
    finish_product(
        y, out, bias + expert * N, addend, addend_rows, target, n, is_row, is_output,
        N, HAS_BIAS, HAS_ADDEND,
    )  # fmt: skip
