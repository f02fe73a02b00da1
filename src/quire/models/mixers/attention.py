"""Softmax attention over keys and values as a part of a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.alibi import alibi_slopes
from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.rotary_tables import query_factors
from quire.models.spec import Alibi, Attention, Temperature
from quire.ops import (
    AttentionArgs,
    GroupBatch,
    LayerKV,
    LinearWeight,
    NormWeight,
    Ops,
    QKNorm,
    RotaryTable,
)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention over the paged KV cache: project, rotate and store, attend, project."""

    ops: Ops
    qkv: LinearWeight
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryTable | None
    qk_norm: QKNorm | None
    clip: float | None
    args: AttentionArgs
    gate: LinearWeight | None
    temper: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, h: Tensor, positions: Tensor, group: GroupBatch, kv: LayerKV) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's K/V into `kv`."""
        ops = self.ops
        q = ops.rope_store(
            ops.linear(h, self.qkv),
            kv,
            group.slots,
            positions,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary=self.rotary,
            qk_norm=self.qk_norm,
            clip=self.clip,
        )
        attended = ops.attend(self.temper(q, positions), kv, group.plan, self.args)
        if self.gate is not None:
            attended = ops.scale_gate(attended, ops.linear(h, self.gate))
        return self.out(attended)


def make_attention(make: Maker, at: str, a: Attention) -> AttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    qkv = make.linear(at + "qkv", at + "q", at + "k", at + "v")
    qk_norm = _qk_norm(make, at, a)
    gate = make.linear(at + "gate", at + "gate") if a.gate == "full" else None
    return AttentionLayer(
        ops=make.ops,
        qkv=qkv,
        qk_norm=qk_norm,
        gate=gate,
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        rotary=make.rotary(a.rope),
        clip=a.clip,
        args=AttentionArgs(
            scale=a.scale,
            softcap=a.softcap,
            window=a.window,
            sinks=make.tensor(at + "sinks") if a.sinks else None,
            alibi=None if a.alibi is None else _slopes(make, a.alibi, a.heads),
        ),
        temper=_temper(make, a.temperature),
    )


def _qk_norm(make: Maker, at: str, a: Attention) -> QKNorm | None:
    if a.qk_norm is None:
        return None
    if a.qk_norm.kind == "rms_bare":
        assert a.qk_norm_over == "head" and not a.qk_norm.bias, "a bare norm is of one head"
        q = k = NormWeight("rms", a.qk_norm.eps, make.ones(a.head_dim))
    else:
        q, k = (make.norm(at + part, a.qk_norm) for part in ("q_norm", "k_norm"))
    return QKNorm(q, k, over=a.qk_norm_over, after_rope=a.qk_norm_after_rope)


def _slopes(make: Maker, alibi: Alibi, heads: int) -> Tensor:
    """Of this worker's heads."""
    rank, size = (0, 1) if make.group is None else (make.group.rank, make.group.size)
    own = alibi_slopes(alibi, heads * size)[rank * heads : (rank + 1) * heads]
    return torch.tensor(own, dtype=torch.float32, device=make.device)


def _temper(make: Maker, t: Temperature | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of queries [T, H, D] and their positions that scales them."""
    if t is None:
        return lambda q, positions: q
    ops, factors = make.ops, query_factors(t, make.max_model_len).to(make.device)
    return lambda q, positions: ops.scale_queries(q, positions, factors)
