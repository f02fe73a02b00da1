"""Clip, q/k norm, rotary embedding and KV write in one pass over the projection's output."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.kernels.triton.kv import PagedKV
from quire.kernels.triton.launch import dense, kernel, power_of_2
from quire.ops.norm import NormWeight
from quire.ops.rotary import QKNorm, RotaryTable

_ROUND = 12_582_912.0
"""1.5 * 2**23: adding and subtracting it rounds a small float32 to a whole number, ties to even."""


@kernel
def _weigh(
    y: Any,
    at: Any,
    inside: Any,
    weight: Any,
    bias: Any,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    """The normalised y (float32) times its weights, rounded as `quire.ops.norm.norm` does."""
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
def _total(x: Any, FULL: tl.constexpr) -> Any:
    """Sum of x [heads, dims] over each head, [heads, 1], or over all, a scalar."""
    if FULL:
        return tl.sum(tl.sum(x, 1), 0)
    else:  # a second path for the compiler, not for Python
        return tl.sum(x, 1)[:, None]


@kernel
def _rope_store_kernel(
    qkv: Any,
    q: Any,
    keys: Any,
    values: Any,
    key_scales: Any,
    value_scales: Any,
    slots: Any,
    positions: Any,
    cos_sin: Any,
    q_weight: Any,
    q_bias: Any,
    k_weight: Any,
    k_bias: Any,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    OVER: tl.constexpr,
    AFTER_ROPE: tl.constexpr,
    Q_HAS_BIAS: tl.constexpr,
    K_HAS_BIAS: tl.constexpr,
    CLIP: tl.constexpr,
    INT8: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """One token's queries (program 0 of axis 1), keys (1) or values (2), all heads at once."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    heads = tl.where(part == 0, H, K)
    first = tl.where(part == 0, 0, tl.where(part == 1, H, H + K))
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (dim < D)[None, :]
    source = qkv + token * ((H + 2 * K) * D) + (first + head)[:, None] * D
    x = tl.load(source + dim[None, :], inside, other=0.0).to(tl.float32)
    if CLIP > 0.0:
        x = tl.minimum(tl.maximum(x, -CLIP), CLIP).to(dtype).to(tl.float32)

    if part < 2:
        if DIM > 0:
            half: tl.constexpr = DIM // 2
            turns = dim < DIM
            if INTERLEAVED:
                partner = tl.where(turns, dim ^ 1, dim)
                is_first = dim % 2 == 0
                angle = dim // 2
            else:
                partner = tl.where(turns, tl.where(dim < half, dim + half, dim - half), dim)
                is_first = dim < half
                angle = dim % half
            other = tl.load(source + partner[None, :], inside, other=0.0).to(tl.float32)
            if CLIP > 0.0:
                other = tl.minimum(tl.maximum(other, -CLIP), CLIP).to(dtype).to(tl.float32)
        if KIND != "" and not AFTER_ROPE:
            count: tl.constexpr = D
            full: tl.constexpr = OVER == "full"
            size = heads * count if full else count
            mean = 0.0 * _total(x, full)
            if KIND == "layer" or KIND == "layer1p" or KIND == "none":
                mean = _total(x, full) / size
            centred = tl.where(inside, x - mean, 0.0)
            inverse = 1.0 / tl.sqrt(_total(centred * centred, full) / size + EPS)
            row = head * D if OVER != "head" else head * 0
            at = row[:, None] + dim[None, :]
            if part == 0:
                x = _weigh(centred * inverse, at, inside, q_weight, q_bias, KIND, Q_HAS_BIAS, dtype)
            else:
                x = _weigh(centred * inverse, at, inside, k_weight, k_bias, KIND, K_HAS_BIAS, dtype)
            if DIM > 0:
                other = tl.where(inside, other - mean, 0.0) * inverse
                at = row[:, None] + partner[None, :]
                if part == 0:
                    other = _weigh(other, at, inside, q_weight, q_bias, KIND, Q_HAS_BIAS, dtype)
                else:
                    other = _weigh(other, at, inside, k_weight, k_bias, KIND, K_HAS_BIAS, dtype)
        if DIM > 0:
            position = tl.load(positions + token)
            line = cos_sin + position * DIM + angle
            cos = tl.load(line, turns, other=1.0).to(dtype).to(tl.float32)
            sin = tl.load(line + half, turns, other=0.0).to(dtype).to(tl.float32)
            straight = (x * cos[None, :]).to(dtype).to(tl.float32)
            across = (other * sin[None, :]).to(dtype).to(tl.float32)
            turned = tl.where(is_first[None, :], straight - across, straight + across)
            x = tl.where(turns[None, :], turned.to(dtype).to(tl.float32), x)
        if KIND != "" and AFTER_ROPE:
            mean = 0.0 * _total(x, False)
            if KIND == "layer" or KIND == "layer1p" or KIND == "none":
                mean = _total(x, False) / D
            centred = tl.where(inside, x - mean, 0.0)
            inverse = 1.0 / tl.sqrt(_total(centred * centred, False) / D + EPS)
            row = head * D if OVER != "head" else head * 0
            at = row[:, None] + dim[None, :]
            if part == 0:
                x = _weigh(centred * inverse, at, inside, q_weight, q_bias, KIND, Q_HAS_BIAS, dtype)
            else:
                x = _weigh(centred * inverse, at, inside, k_weight, k_bias, KIND, K_HAS_BIAS, dtype)

    if part == 0:
        tl.store(q + token * (H * D) + head[:, None] * D + dim[None, :], x.to(dtype), inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            at = slot * (K * D) + head[:, None] * D + dim[None, :]
            if INT8:
                largest = tl.max(tl.abs(tl.where(inside, x, 0.0)), 1)
                is_zero = largest < 1e-30
                scale = tl.where(is_zero, 0.0, largest / 127.0) + tl.sum(
                    tl.where(inside, x * 0.0, 0.0), 1
                )
                inverse = tl.where(is_zero, 0.0, 127.0 / tl.where(is_zero, 1.0, largest))
                whole = (x * inverse[:, None] + ROUND) - ROUND
                whole = tl.minimum(tl.maximum(tl.where(whole == whole, whole, 0.0), -127.0), 127.0)
                lane = slot * K + head
                if part == 1:
                    tl.store(keys + at, whole.to(tl.int8), inside)
                    tl.store(key_scales + lane, scale, head < K)
                else:
                    tl.store(values + at, whole.to(tl.int8), inside)
                    tl.store(value_scales + lane, scale, head < K)
            elif part == 1:
                tl.store(keys + at, x.to(keys.dtype.element_ty), inside)
            else:
                tl.store(values + at, x.to(values.dtype.element_ty), inside)


def rope_store(
    qkv: Tensor,
    kv: PagedKV,
    slots: Tensor,
    positions: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: RotaryTable | None,
    qk_norm: QKNorm | None,
    clip: float | None,
) -> Tensor:
    """See `quire.ops.rotary.rope_store`."""
    if positions.shape[0] != 1:
        hint = "Serve a model whose positions are one number per token."
        raise NotBuiltYet("positions", f"{positions.shape[0]} per token (M-RoPE)", hint)
    qkv, slots, positions = dense(qkv), slots.contiguous(), positions.contiguous()
    num_tokens = qkv.shape[0]
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if not num_tokens:
        return q
    is_int8 = kv.scales is not None
    key_scales, value_scales = kv.scales if kv.scales is not None else (qkv, qkv)
    block = power_of_2(max(heads, kv_heads)) * power_of_2(head_dim)
    _rope_store_kernel[(num_tokens, 3)](
        qkv,
        q,
        kv.keys,
        kv.values,
        key_scales,
        value_scales,
        slots,
        positions,
        qkv if rotary is None else rotary.cos_sin,
        *_weights(qkv, qk_norm),
        H=heads,
        K=kv_heads,
        D=head_dim,
        BLOCK_H=power_of_2(max(heads, kv_heads)),
        BLOCK_D=power_of_2(head_dim),
        DIM=0 if rotary is None else rotary.dim,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        **_norm_facts(qk_norm),
        CLIP=clip or 0.0,
        INT8=is_int8,
        ROUND=_ROUND,
        num_warps=min(8, max(1, block // 512)),
    )
    return q


def _weights(stand_in: Tensor, n: QKNorm | None) -> tuple[Tensor, ...]:
    """Weight and bias of queries, then of keys; the stand-in where there is none."""
    sides: tuple[NormWeight | None, ...] = (None, None) if n is None else (n.q, n.k)
    found: list[Tensor | None] = []
    for side in sides:
        found += (None, None) if side is None else (side.weight, side.bias)
    return tuple(stand_in if t is None else t for t in found)


def _norm_facts(n: QKNorm | None) -> dict[str, Any]:
    if n is None:
        return {
            "KIND": "",
            "EPS": 0.0,
            "OVER": "head",
            "AFTER_ROPE": False,
            "Q_HAS_BIAS": False,
            "K_HAS_BIAS": False,
        }
    assert (n.q.kind, n.q.eps) == (n.k.kind, n.k.eps)
    return {
        "KIND": n.q.kind,
        "EPS": n.q.eps,
        "OVER": n.over,
        "AFTER_ROPE": n.after_rope,
        "Q_HAS_BIAS": n.q.bias is not None,
        "K_HAS_BIAS": n.k.bias is not None,
    }
