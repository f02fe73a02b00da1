"""Latents of new tokens, normed, and their rotated keys, written to paged memory in one pass; the
rotated parts of queries come with them.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.rope_store import load_clipped, partner_of, rotate_dims
from quire.kernels.triton.launch import kernel, power_of_2, readable
from quire.kernels.triton.norms import statistics, weighed
from quire.ops.kv import LayerLatents
from quire.ops.norm import NormWeight
from quire.ops.rotary import RotaryTable, refuse_several_positions


@kernel
def _latent_store_kernel(
    q: tl.tensor,
    out: tl.tensor,
    x: tl.tensor,
    latents: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    X_TOKEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """One token's latent and key (program 0 of axis 1), or its queries (1). PAGE: from one page to
    the next, in numbers. DIM: the dims that rotate, all or none.
    """
    token = tl.program_id(0).to(tl.int64)
    angles = cos_sin + tl.load(positions + token) * DIM
    dim = tl.arange(0, BLOCK_ROTATED)
    dtype: tl.constexpr = x.dtype.element_ty
    if tl.program_id(1) == 1:
        head = tl.arange(0, BLOCK_H)
        is_query = (head < H)[:, None] & (dim < ROTATED)[None, :]
        at = q + token * Q_TOKEN + head[:, None] * Q_HEAD
        query = load_clipped(at + dim[None, :], is_query, 0.0)
        other = load_clipped(at + partner_of(dim, DIM, INTERLEAVED)[None, :], is_query, 0.0)
        query = rotate_dims(query, other, dim, angles, DIM, INTERLEAVED, dtype)
        to = out + (token * H + head[:, None]) * ROTATED + dim[None, :]
        tl.store(to, query.to(dtype), is_query)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            source = x + token * X_TOKEN
            target = latents + slot // S * PAGE + slot % S * (RANK + ROTATED)
            column = tl.arange(0, BLOCK_RANK)
            inside = column < RANK
            values = tl.load(source + column, inside, other=0.0).to(tl.float32)
            mean, inverse = statistics(values, inside, RANK, KIND, EPS, "row")
            y = (values - mean) * inverse
            y = weighed(y, column, inside, weight, bias, KIND, HAS_BIAS, dtype)
            tl.store(target + column, y.to(dtype), inside)
            is_key = (dim < ROTATED)[None, :]
            key_at = source + RANK
            key = load_clipped(key_at + dim[None, :], is_key, 0.0)
            if DIM > 0:
                partner = partner_of(dim, DIM, INTERLEAVED)
                other = load_clipped(key_at + partner[None, :], is_key, 0.0)
                key = rotate_dims(key, other, dim, angles, DIM, INTERLEAVED, dtype)
            tl.store(target + RANK + dim[None, :], key.to(dtype), is_key)


def latent_store(
    q: Tensor,
    x: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    positions: Tensor,
    *,
    norm: NormWeight,
    rotary: RotaryTable | None,
) -> Tensor:
    """See `quire.ops.mixers.latent.latent_store`."""
    refuse_several_positions(positions)
    num_tokens, heads, rotated = q.shape
    assert x.shape[1] == latents.width == latents.rank + rotated
    assert rotary is None or rotary.dim == rotated
    q, x, data = readable(q), readable(x), latents.data
    assert data.stride()[1:] == (latents.width, 1)
    out = q if rotary is None else q.new_empty(num_tokens, heads, rotated)
    if not num_tokens:
        return out
    block_h, block_rank = power_of_2(heads), power_of_2(latents.rank)
    block_rotated = power_of_2(rotated)
    _latent_store_kernel[(num_tokens, 1 if rotary is None else 2)](
        *(q, out, x, data, slots.contiguous(), positions.contiguous()),
        x if rotary is None else rotary.cos_sin,
        x if norm.weight is None else norm.weight,
        x if norm.bias is None else norm.bias,
        H=heads,
        RANK=latents.rank,
        ROTATED=rotated,
        S=latents.block_size,
        PAGE=data.stride(0),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        X_TOKEN=x.stride(0),
        BLOCK_H=block_h,
        BLOCK_RANK=block_rank,
        BLOCK_ROTATED=block_rotated,
        DIM=0 if rotary is None else rotated,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        KIND=norm.kind,
        EPS=norm.eps,
        HAS_BIAS=norm.bias is not None,
        num_warps=min(8, max(1, max(block_h * block_rotated, block_rank) // 512)),
    )
    return out
