"""What happens between the q/k/v projection and attention: clip, q/k norm, rotary embedding, KV
write.

One op, because a native kernel does it in one pass over the projection's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.ops.kv import LayerKV, PlainKV
from quire.ops.norm import NormWeight, norm
from quire.ops.registry import nbytes, op


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


def _rope_store_bytes(qkv: Tensor, kv: LayerKV, slots: Tensor, *_: Any, **__: Any) -> int:
    return 2 * nbytes(qkv) + 2 * nbytes(slots)


def _rope_store_flops(qkv: Tensor, *_: Any, **__: Any) -> int:
    return 6 * qkv.numel()


@op(num_bytes=_rope_store_bytes, flops=_rope_store_flops, mutates=("kv",), format="kv")
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
) -> Tensor:
    """Make queries and store keys and values: qkv [T, (H+2K)*D] -> q [T, H, D].

    In this order: clamp everything to +-clip, q/k norm, rotate q and k by their positions (or
    rotate, then norm), write k and v to slots [T] int64 (PAD_SLOT: nowhere; no other slot twice).
    positions [P, T] int64; P = 1 only, three rows (M-RoPE) raise NotBuiltYet. The result may be a
    view of memory that nobody else uses. Rounding follows `apply_rotary_pos_emb` in transformers:
    cos and sin are cast to qkv's dtype, both products are rounded.
    """
    if positions.shape[0] != 1:
        hint = "Serve a model whose positions are one number per token."
        raise NotBuiltYet("positions", f"{positions.shape[0]} per token (M-RoPE)", hint)
    if clip is not None:
        qkv = qkv.clamp(-clip, clip)
    x = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if qk_norm is not None and not qk_norm.after_rope:
        qk = _norm_qk(qk, heads, qk_norm)
    if rotary is not None:
        qk = _rotate(qk, positions[0], rotary)
    if qk_norm is not None and qk_norm.after_rope:
        qk = _norm_qk(qk, heads, qk_norm)
    index = (slots,)
    kv.keys.index_put_(index, qk[:, heads:])
    kv.values.index_put_(index, v)
    return qk[:, :heads]


def _norm_qk(qk: Tensor, heads: int, n: QKNorm) -> Tensor:
    """qk [T, H+K, D] with normalised queries and keys."""
    q, k = qk[:, :heads], qk[:, heads:]
    if n.over == "full":
        q, k = norm(q.flatten(1), n.q).view(q.shape), norm(k.flatten(1), n.k).view(k.shape)
    else:
        q, k = norm(q, n.q), norm(k, n.k)
    return torch.cat((q, k), 1)


def _rotate(x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """x [T, N, D] with the first `dim` of each head rotated (Su et al. 2021, eq. 34)."""
    if table.dim < x.shape[-1]:
        turned, rest = x[..., : table.dim], x[..., table.dim :]
        return torch.cat((_rotate(turned, positions, table), rest), -1)
    cos_sin = table.cos_sin.index_select(0, positions).to(x.dtype)
    half = table.dim // 2
    # [T, 1, D/2] against the two members of each pair, which are D/2 apart or neighbours
    cos, sin = cos_sin.view(-1, 1, 2, half).unbind(2)
    if table.interleaved:
        pairs, axis = x.unflatten(-1, (half, 2)), -1
    else:
        pairs, axis = x.unflatten(-1, (2, half)), -2
    turned = pairs * cos.unsqueeze(axis)
    first, second = pairs.unbind(axis)
    turned_first, turned_second = turned.unbind(axis)
    turned_first.sub_(second * sin)
    turned_second.add_(first * sin)
    return turned.flatten(-2)
