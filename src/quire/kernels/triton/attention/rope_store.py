"""Clip, q/k norm, rotary embedding and KV write in one pass over the projection's output."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.paged_kv import PagedKV
from quire.kernels.triton.launch import KEEP_NAN, dense, kernel, power_of_2
from quire.kernels.triton.linear.rounding import rounded, rounded_with
from quire.kernels.triton.norms import statistics, weighed
from quire.ops.fp8 import FP8
from quire.ops.kv import FixedScales
from quire.ops.norm import NormWeight
from quire.ops.rotary import QKNorm, RotaryTable, refuse_several_positions


@kernel
def load_clipped(at: tl.tensor, inside: tl.tensor, CLIP: tl.constexpr) -> Any:
    """The values at `at` in float32, cut at +-CLIP and rounded to their type again."""
    x = tl.load(at, inside, other=0.0)
    if CLIP > 0.0:
        x = tl.clamp(x.to(tl.float32), -CLIP, CLIP, KEEP_NAN).to(x.dtype)
    return x.to(tl.float32)


@kernel
def partner_of(dim: tl.tensor, DIM: tl.constexpr, INTERLEAVED: tl.constexpr) -> Any:
    """The other dim of each pair that rotates together."""
    if INTERLEAVED:
        return tl.where(dim < DIM, dim ^ 1, dim)
    else:  # a second path for the compiler, not for Python
        half: tl.constexpr = DIM // 2
        return tl.where(dim < DIM, tl.where(dim < half, dim + half, dim - half), dim)


@kernel
def rotate_dims(
    x: tl.tensor,
    other: tl.tensor,
    dim: tl.tensor,
    angles: tl.tensor,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    """x [heads, dims] rotated with its partners; angles: a line of the table of cos and sin."""
    half: tl.constexpr = DIM // 2
    turns = dim < DIM
    angle = dim // 2 if INTERLEAVED else dim % half
    is_first = dim % 2 == 0 if INTERLEAVED else dim < half
    cos = tl.load(angles + angle, turns, other=1.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + half + angle, turns, other=0.0).to(dtype).to(tl.float32)
    # each product is rounded, as plain torch does
    straight = (x * cos[None, :]).to(dtype).to(tl.float32)
    across = (other * sin[None, :]).to(dtype).to(tl.float32)
    turned = tl.where(is_first[None, :], straight - across, straight + across)
    return tl.where(turns[None, :], turned.to(dtype).to(tl.float32), x)


@kernel
def _query_or_key(
    source: tl.tensor,
    heads: tl.tensor,
    head: tl.tensor,
    dim: tl.tensor,
    inside: tl.tensor,
    angles: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    D: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    OVER: tl.constexpr,
    AFTER_ROPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLIP: tl.constexpr,
) -> Any:
    """One token's queries or keys [heads, dims] in float32, clipped, normalised and rotated."""
    dtype: tl.constexpr = source.dtype.element_ty
    norms_first: tl.constexpr = KIND != "" and not AFTER_ROPE
    axes: tl.constexpr = "full" if OVER == "full" else "head"
    size = heads * D if OVER == "full" else D
    weight_row = head * 0 if OVER == "head" else head * D
    weight_at = weight_row[:, None] + dim[None, :]
    x = load_clipped(source + head[:, None] * D + dim[None, :], inside, CLIP)
    if norms_first:
        mean, inverse = statistics(x, inside, size, KIND, EPS, axes)
        y = (x - mean) * inverse
        x = weighed(y, weight_at, inside, weight, bias, KIND, HAS_BIAS, dtype)
    if DIM > 0:
        step = partner_of(dim, DIM, INTERLEAVED) - dim
        other = load_clipped(source + head[:, None] * D + (dim + step)[None, :], inside, CLIP)
        if norms_first:
            other_at = weight_at + step[None, :]
            y = (other - mean) * inverse
            other = weighed(y, other_at, inside, weight, bias, KIND, HAS_BIAS, dtype)
        x = rotate_dims(x, other, dim, angles, DIM, INTERLEAVED, dtype)
    if KIND != "" and AFTER_ROPE:
        mean, inverse = statistics(x, inside, size, KIND, EPS, axes)
        y = (x - mean) * inverse
        x = weighed(y, weight_at, inside, weight, bias, KIND, HAS_BIAS, dtype)
    return x


@kernel
def _keep(
    x: tl.tensor,
    memory: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    dim: tl.tensor,
    inside: tl.tensor,
    fixed: float,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FIXED: tl.constexpr,
) -> None:
    """Write a token's keys or values [heads, dims] to their slot; fixed: their scale."""
    lane = slot * K + head[:, None]
    at = memory + lane * D + dim[None, :]
    if HAS_SCALES:
        # a norm's mean or bias gives values to lanes beyond the head, which must not set the scale
        x = tl.where(inside, x, 0.0)
        if IS_FIXED:
            numbers, scale = rounded_with(x, fixed, 1, memory.dtype.element_ty)
        else:
            numbers, scale = rounded(x, 1, memory.dtype.element_ty)
        tl.store(at, numbers, inside)
        tl.store(scales + lane, scale, head[:, None] < K)
    else:
        tl.store(at, x.to(memory.dtype.element_ty), inside)


@kernel
def _rope_store_kernel(
    qkv: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_weight: tl.tensor,
    q_bias: tl.tensor,
    k_weight: tl.tensor,
    k_bias: tl.tensor,
    key_scale: float,
    value_scale: float,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    OVER: tl.constexpr,
    AFTER_ROPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLIP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FIXED: tl.constexpr,
) -> None:
    """One token's queries (program 0 of axis 1), keys (1) or values (2), all heads at once. PAGE:
    from one page to the next, in slots.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = qkv + token * ((H + 2 * K) * D)
    angles = cos_sin + tl.load(positions + token) * DIM
    dim = tl.arange(0, BLOCK_D)
    if part == 0:
        q_head = tl.arange(0, BLOCK_H)
        is_query = (q_head < H)[:, None] & (dim < D)[None, :]
        query = _query_or_key(
            source, H, q_head, dim, is_query, angles, q_weight, q_bias,
            D, DIM, INTERLEAVED, KIND, EPS, OVER, AFTER_ROPE, HAS_BIAS, CLIP,
        )  # fmt: skip
        to = q + token * (H * D) + q_head[:, None] * D + dim[None, :]
        tl.store(to, query.to(q.dtype.element_ty), is_query)
    else:
        head = tl.arange(0, BLOCK_K)
        inside = (head < K)[:, None] & (dim < D)[None, :]
        slot = tl.load(slots + token)
        if slot >= 0:
            if PAGE != S:
                # layers that share memory have pages of more slots than they use
                slot += slot // S * (PAGE - S)
            if part == 1:
                key = _query_or_key(
                    source + H * D, K, head, dim, inside, angles, k_weight, k_bias,
                    D, DIM, INTERLEAVED, KIND, EPS, OVER, AFTER_ROPE, HAS_BIAS, CLIP,
                )  # fmt: skip
                _keep(
                    key, keys, key_scales, slot, head, dim, inside,
                    key_scale, K, D, HAS_SCALES, IS_FIXED,
                )  # fmt: skip
            else:
                value_at = (H + K) * D + head[:, None] * D + dim[None, :]
                value = load_clipped(source + value_at, inside, CLIP)
                _keep(
                    value, values, value_scales, slot, head, dim, inside,
                    value_scale, K, D, HAS_SCALES, IS_FIXED,
                )  # fmt: skip


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
    kv_scales: FixedScales | None = None,
) -> Tensor:
    """See `quire.ops.rotary.rope_store`."""
    refuse_several_positions(positions)
    qkv, slots, positions = dense(qkv), slots.contiguous(), positions.contiguous()
    num_tokens = qkv.shape[0]
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if num_tokens:
        _rotate(
            qkv, q, (kv.keys, kv.values, *(kv.scales if kv.scales is not None else (qkv, qkv))),
            slots, positions, rotary, qk_norm, kv_scales,
            K=kv_heads, S=kv.block_size, PAGE=kv.page_slots, CLIP=clip or 0.0,
            HAS_SCALES=kv.scales is not None,
            IS_FIXED=kv_scales is not None and kv.dtype is FP8,
        )  # fmt: skip
    return q


def rope_queries(
    q: Tensor,
    positions: Tensor,
    *,
    heads: int,
    head_dim: int,
    rotary: RotaryTable | None,
    q_norm: NormWeight | None,
) -> Tensor:
    """See `quire.ops.rotary.rope_queries`: the programs of queries alone."""
    refuse_several_positions(positions)
    source, positions = dense(q), positions.contiguous()
    num_tokens = source.shape[0]
    out = source.new_empty(num_tokens, heads, head_dim)
    if num_tokens:
        qk_norm = None if q_norm is None else QKNorm(q_norm, q_norm)
        _rotate(
            source, out, (source,) * 4, positions, positions, rotary, qk_norm, None,
            K=0, S=1, PAGE=1, CLIP=0.0, HAS_SCALES=False, IS_FIXED=False,
        )  # fmt: skip
    return out


def _rotate(
    source: Tensor,
    out: Tensor,
    memory: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    rotary: RotaryTable | None,
    n: QKNorm | None,
    kv_scales: FixedScales | None,
    *,
    K: int,
    **facts: Any,
) -> None:
    """Run the kernel for queries -> out [T, H, D], and for K heads of keys and values if there are
    some. `memory`: theirs and that of their scales.
    """
    num_tokens, heads, head_dim = out.shape
    block_h, block_d = power_of_2(heads), power_of_2(head_dim)
    _rope_store_kernel[(num_tokens, 3 if K else 1)](
        source, out, *memory, slots, positions,
        source if rotary is None else rotary.cos_sin,
        *_weights(source, n),
        *(kv_scales or (1.0, 1.0)),
        H=heads, K=K, D=head_dim,
        BLOCK_H=block_h, BLOCK_K=power_of_2(K), BLOCK_D=block_d,
        DIM=0 if rotary is None else rotary.dim,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        **_norm_facts(n),
        **facts,
        num_warps=min(8, max(1, block_h * block_d // 512)),
    )  # fmt: skip


def _weights(stand_in: Tensor, n: QKNorm | None) -> tuple[Tensor, ...]:
    """Weight and bias of queries, then of keys; the stand-in for a missing one."""
    sides: tuple[NormWeight | None, ...] = (None, None) if n is None else (n.q, n.k)
    found: list[Tensor | None] = []
    for side in sides:
        found += (None, None) if side is None else (side.weight, side.bias)
    return tuple(stand_in if t is None else t for t in found)


def _norm_facts(n: QKNorm | None) -> dict[str, Any]:
    if n is None:
        facts = ("", 0.0, "head", False, False)
    else:
        has_bias = n.q.bias is not None
        assert (n.q.kind, n.q.eps, has_bias) == (n.k.kind, n.k.eps, n.k.bias is not None)
        facts = (n.q.kind, n.q.eps, n.over, n.after_rope, has_bias)
    return dict(zip(("KIND", "EPS", "OVER", "AFTER_ROPE", "HAS_BIAS"), facts, strict=True))
