"""The steps between the q/k/v projection and attention: clip, q/k norm, rotary embedding, KV write.

One op, because a native kernel does it in one pass over the projection's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.ops.kv import FixedScales, PlainKV
from quire.ops.norm import NormWeight, norm
from quire.ops.registry import op


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines per position: cos_sin [P_max, dim] fp32, the dim/2 cosines, then the dim/2
    sines.

    A scaling of attention (YaRN) is folded into the values. `dim` <= D is how much of a head
    rotates, from its start. interleaved: the pairs are (0, 1), (2, 3), ... (GPT-J), else (0,
    dim/2), (1, dim/2 + 1), ... (GPT-NeoX, Llama).
    """

    cos_sin: Tensor
    dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert self.dim % 2 == 0 and self.cos_sin.shape[1] == self.dim


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norms of queries and keys.

    over: "head" one weight [D] for all heads; "per_head" weights [H, D] and [K, D]; "full" one norm
    over all heads together, weights [H*D] and [K*D], which always comes before the rotation.
    """

    q: NormWeight
    k: NormWeight
    over: Literal["head", "full", "per_head"] = "head"
    after_rope: bool = False

    def __post_init__(self) -> None:
        assert not (self.over == "full" and self.after_rope)


@op(axes={"qkv": 0, "slots": 0, "positions": 1}, mutates=("kv",), format="kv")
def rope_store(
    qkv: Tensor,
    kv: PlainKV,
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
    """Make queries and store keys and values: qkv [T, (H+2K)*D] -> q [T, H, D].

    In this order: clamp everything to +-clip, q/k norm, rotate q and k by their positions (or
    rotate, then norm), write k and v to slots [T] int64 (PAD_SLOT: nowhere; no other slot twice).
    kv_scales: of all vectors in memory of e4m3, whose larger numbers become the largest of the
    type; None: each vector has its own, as in memory of other types, where they are not used.
    positions [P, T] int64; P = 1 only, three rows (M-RoPE) raise NotBuiltYet. The result may be a
    view of memory that is not used otherwise. Rounding follows `apply_rotary_pos_emb` in
    transformers: cos and sin are cast to qkv's dtype, both products are rounded.
    """
    refuse_several_positions(positions)
    if clip is not None:
        qkv = qkv.clamp(-clip, clip)
    x = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    # narrow: a view at half the cost of split or of an index
    qk, v = x.narrow(1, 0, heads + kv_heads), x.narrow(1, heads + kv_heads, kv_heads)
    if qk_norm is not None and not qk_norm.after_rope:
        qk = _norm_qk(qk, heads, qk_norm)
    if rotary is not None:
        qk = rotate(qk, positions[0], rotary)
    if qk_norm is not None and qk_norm.after_rope:
        qk = _norm_qk(qk, heads, qk_norm)
    q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
    kv.write(slots, k, v, kv_scales)
    return q


@op(axes={"q": 0, "positions": 1}, only_for="keys and values that are elsewhere or not kept")
def rope_queries(
    q: Tensor,
    positions: Tensor,
    *,
    heads: int,
    head_dim: int,
    rotary: RotaryTable | None,
    q_norm: NormWeight | None,
) -> Tensor:
    """Make queries alone, where keys and values are another layer's, or keys alone where nothing
    is kept: q [T, H*D] -> [T, H, D].

    A norm of each head with one weight [D], then the rotation, as in `rope_store`.
    """
    refuse_several_positions(positions)
    x = q.view(-1, heads, head_dim)
    if q_norm is not None:
        x = norm(x, q_norm)
    return x if rotary is None else rotate(x, positions[0], rotary)


@op(axes={"positions": 1}, is_invariant=True, only_for="positions on several axes")
def mix_axes(positions: Tensor, table: Tensor, axes: Tensor) -> Tensor:
    """A step's own rotary table: positions [P, T] int64, the table [P_max, dim] fp32 of single
    positions, and for each of the dim / 2 frequencies its axis, axes [dim / 2] int64 -> [T, dim],
    an entry for each token (M-RoPE, Qwen2-VL section 2.1).
    """
    chosen = positions.index_select(0, axes).t()  # [T, dim / 2]
    halves = table.unflatten(1, (2, -1))
    return halves.gather(0, chosen[:, None].expand(-1, 2, -1)).flatten(1)


@op(axes={"q": 0, "positions": 1}, is_invariant=True)
def scale_queries(q: Tensor, positions: Tensor, factors: Tensor) -> Tensor:
    """q [T, H, D] times the factors [P] fp32 of their positions [1, T], in q's dtype."""
    refuse_several_positions(positions)
    return (q * factors.index_select(0, positions[0])[:, None, None]).to(q.dtype)


def refuse_several_positions(positions: Tensor) -> None:
    """Raise NotBuiltYet for positions [P, T] with P above 1."""
    if positions.shape[0] != 1:
        hint = "Serve a model whose positions are one number per token."
        raise NotBuiltYet("positions", f"{positions.shape[0]} per token (M-RoPE)", hint)


def _norm_qk(qk: Tensor, heads: int, n: QKNorm) -> Tensor:
    """qk [T, H+K, D] with normalised queries and keys, a new tensor."""
    kv_heads = qk.shape[1] - heads
    q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
    if n.over == "full":
        q, k = norm(q.flatten(1), n.q).view(q.shape), norm(k.flatten(1), n.k).view(k.shape)
        return torch.cat((q, k), 1)
    q_weight, k_weight = n.q.weight, n.k.weight
    is_rms = n.q.kind == n.k.kind == "rms" and n.q.eps == n.k.eps
    if is_rms and q_weight is not None and k_weight is not None:
        # one pass over both, because a call costs more than its arithmetic; the bits are the same
        y = torch.rms_norm(qk, qk.shape[-1:], None, n.q.eps)
        y.narrow(1, 0, heads).mul_(q_weight)
        y.narrow(1, heads, kv_heads).mul_(k_weight)
        return y
    return torch.cat((norm(q, n.q), norm(k, n.k)), 1)


def rotate(x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """A new x [T, N, D], the first `dim` of each head rotated (Su et al. 2021, eq. 34)."""
    num_tokens, num_heads, head_dim = x.shape
    if table.dim < head_dim:
        turned, rest = x[..., : table.dim], x[..., table.dim :]
        return torch.cat((rotate(turned, positions, table), rest), -1)
    half = table.dim // 2
    # the two members of a pair are neighbours, or half a head apart
    pairs, angles, axis = (half, 2), (half, 1), -1
    if not table.interleaved:
        pairs, angles, axis = (2, half), (1, half), -2
    cos_sin = table.cos_sin.index_select(0, positions).to(x.dtype)
    cos, sin = cos_sin.view(num_tokens, 2, 1, *angles).unbind(1)
    x = x.view(num_tokens, num_heads, *pairs)
    y = x * cos
    turns = x * sin
    first, second = y.unbind(axis)
    turn_first, turn_second = turns.unbind(axis)
    first.sub_(turn_second)
    second.add_(turn_first)
    return y.view(num_tokens, num_heads, head_dim)
