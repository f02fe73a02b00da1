"""Activations and gates, element by element."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import KEEP_NAN, dense, kernel

_BLOCK = 1024


@kernel
def activation(x: tl.tensor, ACT: tl.constexpr) -> Any:
    """x in float32 through the activation of that name in `quire.ops.activation`."""
    if ACT == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
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
    count: int,
    F: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out [T, F] from x [T, 2F] (gate, then up) or [T, F]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dtype = out.dtype.element_ty
    if not GATED:
        y = activation(tl.load(x + at, inside, other=0.0).to(tl.float32), ACT)
    else:
        gate_at = (at // F) * (2 * F) + at % F
        gate = tl.load(x + gate_at, inside, other=0.0).to(tl.float32)
        up = tl.load(x + gate_at + F, inside, other=0.0).to(tl.float32)
        if LIMIT > 0.0:
            gate = tl.minimum(gate, LIMIT, KEEP_NAN)
            up = tl.clamp(up, -LIMIT, LIMIT, KEEP_NAN)
            y = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
        else:
            # plain torch rounds the activation before it multiplies
            y = activation(gate, ACT).to(dtype).to(tl.float32) * up
    tl.store(out + at, y.to(dtype), inside)


@kernel
def _scale_gate_kernel(
    y: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    count: int,
    F: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = y [T, F] * sigmoid(gate [T, G]), G is F or 1."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_at = at if G == F else at // F
    g = tl.load(gate + gate_at, inside, other=0.0).to(tl.float32)
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
        _activate_kernel[(-(-out.numel() // _BLOCK),)](
            x, out, out.numel(), F=width, ACT=act, GATED=gated, LIMIT=limit, BLOCK=_BLOCK
        )
    return out


def scale_gate(y: Tensor, gate: Tensor) -> Tensor:
    """See `quire.ops.activation.scale_gate`."""
    y, gate = dense(y), dense(gate)
    out = torch.empty_like(y)
    if y.numel():
        _scale_gate_kernel[(-(-y.numel() // _BLOCK),)](
            y, gate, out, y.numel(), F=y.shape[1], G=gate.shape[1], BLOCK=_BLOCK
        )
    return out
