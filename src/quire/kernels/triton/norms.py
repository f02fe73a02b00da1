"""Norms and residual sums: one program per row, the row in registers."""

# The parameters of kernels are named as in the other kernels here: constants in capitals.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dense, kernel, power_of_2
from quire.ops.norm import NormWeight

MAX_WIDTH = 32_768
"""Of a row, which one program holds in registers."""

_RMS = ("rms", "rms_late_cast", "rms1p")


@kernel
def _norm_kernel(
    x: Any,
    delta: Any,
    total: Any,
    out: Any,
    weight: Any,
    bias: Any,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
) -> None:
    """Row i of x [*, C] -> out, and total = x + SCALE * delta where there is a delta."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    at = row * C + columns
    dtype = x.dtype.element_ty
    values = tl.load(x + at, inside, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + at, inside, other=0.0).to(tl.float32)
        if SCALE != 1.0:
            change = (change * SCALE).to(dtype).to(tl.float32)
        values = (values.to(tl.float32) + change).to(dtype)
        tl.store(total + at, values, inside)
    wide = values.to(tl.float32)
    if KIND == "layer" or KIND == "layer1p" or KIND == "none":
        mean = tl.sum(wide, 0) / C
        wide = tl.where(inside, wide - mean, 0.0)
    y = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + EPS))
    if KIND == "rms":
        y = y.to(dtype).to(tl.float32)
    if KIND != "none":
        w = tl.load(weight + (row % WEIGHT_ROWS) * C + columns, inside, other=0.0).to(tl.float32)
        if KIND == "rms1p":
            w += 1.0
        if KIND == "layer1p":
            w = (w + 1.0).to(dtype).to(tl.float32)
        y *= w
    if HAS_BIAS:
        b = tl.load(bias + (row % WEIGHT_ROWS) * C + columns, inside, other=0.0).to(tl.float32)
        if KIND == "rms" or KIND == "rms_late_cast" or KIND == "rms1p":
            y = y.to(dtype).to(tl.float32)
        y += b
    tl.store(out + at, y.to(dtype), inside)


@kernel
def _add_kernel(
    x: Any, delta: Any, out: Any, count: int, SCALE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """out = x + SCALE * delta, all of `count` elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    change = tl.load(delta + at, inside, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        change = (change * SCALE).to(x.dtype.element_ty).to(tl.float32)
    values = tl.load(x + at, inside, other=0.0).to(tl.float32) + change
    tl.store(out + at, values.to(x.dtype.element_ty), inside)


def norm(x: Tensor, n: NormWeight) -> Tensor:
    """See `quire.ops.norm.norm`."""
    x = dense(x)
    out = torch.empty_like(x)
    _run(x, None, None, out, n, 1.0)
    return out


def add(x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
    """See `quire.ops.norm.add`."""
    x, delta = dense(x), dense(delta)
    out = torch.empty_like(x)
    if x.numel():
        block = 1024
        _add_kernel[(-(-x.numel() // block),)](
            x, delta, out, x.numel(), SCALE=scale, BLOCK=block, num_warps=4
        )
    return out


def add_norm(x: Tensor, delta: Tensor, n: NormWeight, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """See `quire.ops.norm.add_norm`."""
    x, delta = dense(x), dense(delta)
    total, out = torch.empty_like(x), torch.empty_like(x)
    _run(x, delta, total, out, n, scale)
    return total, out


def _run(
    x: Tensor,
    delta: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    n: NormWeight,
    scale: float,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    if not rows:
        return
    assert width <= MAX_WIDTH, f"a row of {width} is too long for one program"
    block = power_of_2(width)
    weight = x if n.weight is None else n.weight
    _norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        x if total is None else total,
        out,
        weight,
        x if n.bias is None else n.bias,
        C=width,
        BLOCK=block,
        KIND=n.kind,
        EPS=n.eps,
        SCALE=scale,
        HAS_DELTA=delta is not None,
        HAS_BIAS=n.bias is not None,
        WEIGHT_ROWS=1 if n.weight is None else n.weight.numel() // width,
        num_warps=min(16, max(1, block // 512)),
    )
