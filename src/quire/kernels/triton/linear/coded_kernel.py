"""The kernel of products with weights in codes: (code - zero point) * scale, with one scale and
one zero point for every output and group of inputs.

A program reads codes as they are stored, decodes them in registers to whole numbers or few-bit
floats, which every operand type holds exactly, multiplies a run of inputs that has one scale, and
adds run after run times its scale in fp32. How inputs are cut into runs depends on the weight
alone.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl

from quire.kernels.triton.launch import kernel
from quire.kernels.triton.linear.product_kernel import (
    finish_product,
    inputs_of,
    is_below,
    rows_of_program,
)


@kernel
def _numbers(code: tl.tensor, zero: tl.tensor, CODES: tl.constexpr, DOT: tl.constexpr) -> Any:
    """uint8 codes [OUTPUTS, RUN] -> the numbers that they stand for as DOT, divided by the
    kernel's `unit`; zero [OUTPUTS] int32.
    """
    if CODES == "e4m3":  # the same exponent and mantissa as float16 has, 2**8 times as small
        half = ((code.to(tl.uint16) & 0x80) << 8) | ((code.to(tl.uint16) & 0x7F) << 7)
        # NaN of e4m3, which moved bits would make a number
        half = tl.where((code & 0x7F) == 0x7F, 0x7E00, half).to(tl.uint16)
        return half.to(tl.float16, bitcast=True).to(DOT)
    elif CODES == "e2m1":  # likewise, 2**14 times as small
        half = ((code.to(tl.uint16) & 8) << 12) | ((code.to(tl.uint16) & 7) << 9)
        return half.to(tl.float16, bitcast=True).to(DOT)
    else:
        return (code.to(tl.int32) - zero[:, None]).to(DOT)


@kernel
def _scale_and_zero(
    scales: tl.tensor,
    zeros: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
) -> Any:
    """Scale, fp32, and zero point, int32, of outputs at `at` [OUTPUTS]: in one number of 32 bits
    where scales have 16, since the least that a program can copy ahead are four bytes.
    """
    if SCALES == "float32":
        zero = tl.full(at.shape, MIDDLE, tl.int32)
        if HAS_ZEROS:
            zero = tl.load(zeros + at, is_there, other=0)
        return tl.load(scales + at, is_there, other=0.0), zero
    else:
        both = tl.load(scales + at, is_there, other=0)
        if SCALES == "bfloat16":
            scale = (both << 16).to(tl.float32, bitcast=True)
        else:
            scale = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale, (both >> 16) & 255


@kernel
def coded_product_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
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
    PITCH: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Rows of tile program_id(0) times outputs of tile program_id(1) of codes w [(E,) N, PITCH].

    CODES: "u4" (in pairs of runs: byte j has input j of the first in its low half, that of the
    second in its high half) or "u8", with zero points; "e4m3"; "e2m1" (pairs, too). scales [(E,)
    GROUPS, N] as `_scale_and_zero` reads them, and zeros; a scale for GROUP inputs, 0: for all.
    RUN divides GROUP. ROW_GROUPS: of row_scales [*, ROW_GROUPS] of x, which is numbers then; 0:
    there are none. The other arguments are those of `product_kernel`.
    """
    # the grid is made for the most tiles that a choice of experts can have
    if GROUPED and tl.load(starts + tl.program_id(0)) >= tl.load(ends + tl.program_id(0)):
        return
    expert, target, source, is_row = rows_of_program(
        order, experts, starts, ends, T, GROUPED, SHARED, ROWS
    )
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = is_below(n, N, OUTPUTS)
    x_row = x + source * C
    w_row = w + (expert * N + n) * PITCH
    first = expert * (GROUPS * N) + n
    halves: tl.constexpr = 2 if CODES == "u4" or CODES == "e2m1" else 1
    middle: tl.constexpr = 8 if halves == 2 else 128
    # what a number times its scale is multiplied with
    unit: tl.constexpr = 256.0 if CODES == "e4m3" else 16384.0 if CODES == "e2m1" else 1.0
    steps: tl.constexpr = (C + halves * RUN - 1) // (halves * RUN)
    lane = tl.arange(0, RUN)
    nothing, no_rows = tl.zeros((OUTPUTS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    y = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = step * RUN + lane
        if halves == 1 and C % RUN:
            b = tl.load(w_row[:, None] + at[None, :], is_output[:, None] & (at < C)[None, :], 0)
        else:  # a second path for the compiler, not for Python
            b = tl.load(w_row[:, None] + at[None, :], is_output[:, None], 0)
        for half in tl.static_range(halves):
            start = (step * halves + half) * RUN
            c = start + lane
            group = 0
            if GROUP:
                group = start // GROUP
            scale, zero = _scale_and_zero(
                scales, zeros, first + group * N,
                is_output & is_below(start + nothing, C, halves * RUN),
                SCALES, HAS_ZEROS, middle,
            )  # fmt: skip
            code = b
            if halves == 2:
                code = (b >> 4) if half else (b & 15)
            x_tile = inputs_of(x_row, is_row, c, is_below(c, C, halves * RUN), DOT)
            numbers = _numbers(code, zero, CODES, DOT)
            part = tl.dot(numbers, x_tile, input_precision="ieee", out_dtype=tl.float32)
            part *= (scale * unit)[:, None]
            if ROW_GROUPS > 1:
                here = is_row & is_below(start + no_rows, C, halves * RUN)
                part *= tl.load(row_scales + source * ROW_GROUPS + group, here, other=0.0)[None, :]
            y += part
    if ROW_GROUPS == 1:
        y *= tl.load(row_scales + source, is_row, other=0.0)[None, :]
    finish_product(
        y, out, bias + expert * N, addend, addend_rows, target, n, is_row, is_output,
        N, HAS_BIAS, HAS_ADDEND,
    )  # fmt: skip
