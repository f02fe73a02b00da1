"""Activations and gates, element by element."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import KEEP_NAN, columns_of, dense, kernel


@kernel
def activation(x: tl.tensor, ACT: tl.constexpr) -> Any:
    """x in float32 through the activation of that name in `quire.ops.activation`."""
    if ACT == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # (1 + tanh(inner)) / 2 in a form in which an overflow of the exponential makes the quotient
        # 0
        y = x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    else:
        tl.static_assert(ACT == "relu" or ACT == "relu2")
        y = tl.maximum(x, 0.0, KEEP_NAN)
        if ACT == "relu2":
            y *= y
    return y


@kernel
def _activate_kernel(
    x: tl.tensor,
    out: tl.tensor,
    F: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Columns program_id(1) of row program_id(0) of out [T, F], from x [T, 2F] (gate, then up) or
    [T, F].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    dtype = out.dtype.element_ty
    if not GATED:
        y = activation(tl.load(x + row * F + column, inside, other=0.0).to(tl.float32), ACT)
    else:
        source = x + row * (2 * F) + column
        gate = tl.load(source, inside, other=0.0).to(tl.float32)
        up = tl.load(source + F, inside, other=0.0).to(tl.float32)
        if LIMIT > 0.0:
            gate = tl.minimum(gate, LIMIT, KEEP_NAN)
            up = tl.clamp(up, -LIMIT, LIMIT, KEEP_NAN)
            y = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
        else:
            # plain torch rounds the activation before it multiplies
            y = activation(gate, ACT).to(dtype).to(tl.float32) * up
    tl.store(out + row * F + column, y.to(dtype), inside)


@kernel
def _scale_gate_kernel(
    y: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    F: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = y [T, F] * sigmoid(gate [T, G]), G is F or 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    at = row * F + column
    if G == F:
        g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    else:  # a second path for the compiler, not for Python
        g = tl.load(gate + row).to(tl.float32)
    # plain torch rounds the sigmoid before it multiplies
    open_share = (1.0 / (1.0 + tl.exp(-g))).to(y.dtype.element_ty).to(tl.float32)
    values = tl.load(y + at, inside, other=0.0).to(tl.float32) * open_share
    tl.store(out + at, values.to(out.dtype.element_ty), inside)


def activate(x: Tensor, act: str, *, gated: bool, limit: float = 0.0) -> Tensor:
    """x [T, 2F] (gate, then up; gated) or [T, F] -> [T, F]. A limit > 0 is gpt-oss's gate, whatever
    `act` is (`quire.ops.activation.gated_with_limit`).
    """
    x = dense(x)
    width = x.shape[-1] // (2 if gated else 1)
    out = x.new_empty(*x.shape[:-1], width)
    if out.numel():
        blocks, block = columns_of(width)
        _activate_kernel[(out.numel() // width, blocks)](
            x, out, F=width, ACT=act, GATED=gated, LIMIT=limit, BLOCK=block
        )
    return out


def scale_gate(y: Tensor, gate: Tensor) -> Tensor:
    """See `quire.ops.activation.scale_gate`."""
    y, gate = dense(y), dense(gate)
    out = torch.empty_like(y)
    if y.numel():
        blocks, block = columns_of(y.shape[1])
        _scale_gate_kernel[(len(y), blocks)](
            y, gate, out, F=y.shape[1], G=gate.shape[1], BLOCK=block
        )
    return out
