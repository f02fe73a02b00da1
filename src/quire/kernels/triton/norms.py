"""Norms and residual sums: one program per row, the row in registers."""

# The parameters of kernels are named as in the other kernels here: constants in capitals.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import columns_of, dense, kernel, power_of_2
from quire.ops.norm import NormWeight

MAX_WIDTH = 32_768
"""Largest width of a row, which one program holds in registers."""


@kernel
def total(x: tl.tensor, OVER: tl.constexpr) -> Any:
    """Sum of x [C] (OVER "row"), of each head of x [heads, dims] ("head"), or of all ("full")."""
    if OVER == "row":
        return tl.sum(x, 0)
    elif OVER == "head":  # elif and else: paths for the compiler, not for Python
        return tl.sum(x, 1)[:, None]
    else:
        return tl.sum(tl.sum(x, 1), 0)


@kernel
def statistics(
    x: tl.tensor,
    inside: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    OVER: tl.constexpr,
) -> Any:
    """Statistics that normalise float32 x, 0 outside: its mean (0 where the kind keeps it) and one
    over its deviation.
    """
    mean = tl.zeros((), tl.float32)
    if KIND == "layer" or KIND == "layer1p" or KIND == "none":
        mean = total(x, OVER) / size
    # lanes beyond the row would count with minus the mean
    centred = tl.where(inside, x - mean, 0.0)
    return mean, 1.0 / tl.sqrt(total(centred * centred, OVER) / size + EPS)


@kernel
def weighed(
    y: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    """Normalised float32 y times the weight at `at`, rounded as `quire.ops.norm.norm` does."""
    if KIND == "rms":
        y = y.to(dtype).to(tl.float32)
    if KIND != "none":
        w = tl.load(weight + at, inside, other=0.0).to(tl.float32)
        if KIND == "rms1p":
            w += 1.0
        if KIND == "layer1p":
            w = (w + 1.0).to(dtype).to(tl.float32)
        y *= w
    if HAS_BIAS:
        if KIND == "rms" or KIND == "rms_late_cast" or KIND == "rms1p":
            y = y.to(dtype).to(tl.float32)
        y += tl.load(bias + at, inside, other=0.0).to(tl.float32)
    return y.to(dtype).to(tl.float32)


@kernel
def plus(values: tl.tensor, delta: tl.tensor, SCALE: tl.constexpr, dtype: tl.constexpr) -> Any:
    """values + SCALE * delta; the product is rounded before the sum."""
    delta = delta.to(tl.float32)
    if SCALE != 1.0:
        delta = (delta * SCALE).to(dtype).to(tl.float32)
    return (values.to(tl.float32) + delta).to(dtype)


@kernel
def _norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    total_out: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
) -> None:
    """Row i of x [*, C] -> out, and total_out = x + SCALE * delta where there is a delta."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    at = row * C + columns
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + at, inside, other=0.0)
    if HAS_DELTA:
        values = plus(values, tl.load(delta + at, inside, other=0.0), SCALE, dtype)
        tl.store(total_out + at, values, inside)
    wide = values.to(tl.float32)
    mean, inverse = statistics(wide, inside, C, KIND, EPS, "row")
    weight_at = (row % WEIGHT_ROWS) * C + columns
    y = (wide - mean) * inverse
    y = weighed(y, weight_at, inside, weight, bias, KIND, HAS_BIAS, dtype)
    tl.store(out + at, y.to(dtype), inside)


@kernel
def _add_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    out: tl.tensor,
    C: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = x + SCALE * delta: columns program_id(1) of row program_id(0)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    at = tl.program_id(0).to(tl.int64) * C + column
    values = tl.load(x + at, inside, other=0.0)
    change = tl.load(delta + at, inside, other=0.0)
    tl.store(out + at, plus(values, change, SCALE, x.dtype.element_ty), inside)


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
        width = x.shape[-1]
        blocks, block = columns_of(width)
        _add_kernel[(x.numel() // width, blocks)](x, delta, out, C=width, SCALE=scale, BLOCK=block)
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
