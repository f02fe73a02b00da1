"""Softmax attention over keys and values as a part of a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.models.alibi import alibi_slopes
from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.parameters import projections_of
from quire.models.positions import Alibi, Temperature
from quire.models.rotary_tables import query_factors
from quire.models.spec import Attention, Norm
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
from quire.ops.kv import FixedScales


@dataclass(frozen=True, slots=True)
class Gate:
    """A projection to gates, and the op that opens heads by them."""

    weight: LinearWeight
    scale: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class NormsOverWorkers:
    """The projection to queries, keys and values with their norms, where these are over the heads
    of all workers of a group: each norms the whole rows, and goes on with its part. `copies`: as
    many workers, next to each other, have the same keys.
    """

    ops: Ops
    group: WorkerGroup
    qkv: LinearWeight
    widths: tuple[int, int, int]
    q_norm: NormWeight
    k_norm: NormWeight
    clip: float | None
    copies: int = 1

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, (H+2K)*D] of this worker's heads."""
        qkv = self.ops.linear(h, self.qkv)
        return self.group.apply(self._normed, (qkv,), sum(self.widths))

    def _normed(self, qkv: Tensor) -> Tensor:
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = qkv.split(self.widths, 1)
        keys = self._part(k, self.k_norm, self.copies)
        return torch.cat((self._part(q, self.q_norm, 1), keys, v), 1)

    def _part(self, x: Tensor, norm: NormWeight, copies: int) -> Tensor:
        parts = self.group.gather(x.contiguous())[:, ::copies]
        whole = self.ops.norm(parts.flatten(1), norm)
        return whole.unflatten(1, (parts.shape[1], -1))[:, self.group.rank // copies]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention over the paged KV cache: project, rotate and store, attend, project."""

    ops: Ops
    qkv: Projection
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryTable | None
    qk_norm: QKNorm | None
    qkv_norm: NormWeight | None
    clip: float | None
    args: AttentionArgs
    gate: Gate | None
    temper: Callable[[Tensor, Tensor], Tensor]
    kv_scales: FixedScales | None = None

    def __call__(self, h: Tensor, positions: Tensor, group: GroupBatch, kv: LayerKV) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's K/V into `kv`."""
        ops = self.ops
        qkv = self.qkv(h)
        if self.qkv_norm is not None:
            qkv = ops.norm(qkv.unflatten(1, (-1, self.head_dim)), self.qkv_norm).flatten(1)
        q = ops.rope_store(
            qkv,
            kv,
            group.slots,
            positions,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary=self.rotary if group.rotary is None else group.rotary,
            qk_norm=self.qk_norm,
            clip=self.clip,
            kv_scales=self.kv_scales,
        )
        attended = ops.attend(self.temper(q, positions), kv, group.plan, self.args)
        if self.gate is not None:
            attended = self.gate.scale(attended, ops.linear(h, self.gate.weight))
        return self.out(attended)


@dataclass(frozen=True, slots=True)
class SharedAttentionLayer:
    """Attention over the keys and values of another layer, whose memory it is called with."""

    ops: Ops
    queries: LinearWeight
    out: Projection
    heads: int
    head_dim: int
    rotary: RotaryTable | None
    q_norm: NormWeight | None
    args: AttentionArgs

    def __call__(self, h: Tensor, positions: Tensor, group: GroupBatch, kv: LayerKV) -> Tensor:
        """h [T, C] -> [T, C]; the other layer has written this step's K/V."""
        ops = self.ops
        q = ops.rope_queries(
            ops.linear(h, self.queries),
            positions,
            heads=self.heads,
            head_dim=self.head_dim,
            rotary=self.rotary,
            q_norm=self.q_norm,
        )
        return self.out(ops.attend(q, kv, group.plan, self.args))


def make_attention(make: Maker, at: str, a: Attention) -> AttentionLayer | SharedAttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order."""
    assert a.is_causal, "prompts that are seen whole have a mixer of their own"
    assert a.distances is None, "scores by distances are of whole prompts"
    if a.shares is not None:
        return _shared(make, at, a)
    qkv = make.linear(
        at + "qkv",
        *(at + part for part in projections_of(a)),
        change=_change_of_inputs(a),
    )
    project: Projection = partial(make.ops.linear, w=qkv)
    qk_norm = None if a.value_norm else _qk_norm(make, at, a)
    qkv_norm = _qkv_norm(make, at, a) if a.value_norm else None
    clip = a.clip
    workers = make.group_of(at + "o.weight")
    if workers is not None and qk_norm is not None and qk_norm.over == "full":
        keys = make.weights.part_of(at + "k.weight")
        # several workers may have the same head of keys, which a norm over all heads counts once
        copies = workers.size // (1 if keys is None else keys.count)
        project = _normed_over_workers(make.ops, workers, qkv, qk_norm, a, copies)
        # both are done by then, on whole rows
        qk_norm = clip = None
    gate = None if a.gate == "none" else _gate(make, at, a)
    return AttentionLayer(
        ops=make.ops,
        qkv=project,
        qk_norm=qk_norm,
        qkv_norm=qkv_norm,
        gate=gate,
        out=make.row_linear(at + "o", a.heads, _change_of_outputs(a)),
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        rotary=make.rotary(a.rope),
        clip=clip,
        args=_args(make, at, a),
        temper=tempering(make, a.temperature),
        kv_scales=make.weights.cache_scales(at),
    )


def _change_of_inputs(a: Attention) -> Callable[[Tensor], Tensor] | None:
    """Changes rows of stored queries, keys and values: keys twice where they are the
    values, too, and zeros after each head's values where these are shorter than keys.
    """
    own = a.kv_heads * a.head_dim
    if a.values_are_keys:
        return lambda rows: torch.cat((rows, rows[-own:]))
    if a.value_dim is None:
        return None
    # keys and values have one width in the cache and in kernels; zeros change no sum
    before, missing = (a.heads + a.kv_heads) * a.head_dim, a.head_dim - a.value_dim
    assert missing > 0, "values are shorter than keys"

    def padded(rows: Tensor) -> Tensor:
        values = rows[before:].unflatten(0, (a.kv_heads, -1))
        zeros = values.new_zeros(a.kv_heads, missing, *values.shape[2:])
        return torch.cat((rows[:before], torch.cat((values, zeros), 1).flatten(0, 1)))

    return padded


def _change_of_outputs(a: Attention) -> Callable[[Tensor], Tensor] | None:
    """Zeros after the columns of each head whose values are shorter than keys."""
    if a.value_dim is None:
        return None
    missing = a.head_dim - a.value_dim
    return lambda weight: F.pad(weight.unflatten(1, (a.heads, -1)), (0, missing)).flatten(1)


def _gate(make: Maker, at: str, a: Attention) -> Gate:
    scale = make.ops.scale_gate if a.gate == "full" else make.ops.scale_heads
    return Gate(make.linear(at + "gate", at + "gate"), scale)


def _shared(make: Maker, at: str, a: Attention) -> SharedAttentionLayer:
    kinds = (a.qk_norm_over, a.qk_norm_after_rope, a.clip, a.temperature, a.gate, a.value_dim)
    assert kinds == ("head", False, None, None, "none", None), "queries alone have no other form"
    return SharedAttentionLayer(
        ops=make.ops,
        queries=make.linear(at + "q", at + "q"),
        q_norm=None if a.qk_norm is None else make.norm(at + "q_norm", a.qk_norm),
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        head_dim=a.head_dim,
        rotary=make.rotary(a.rope),
        args=_args(make, at, a),
    )


def _args(make: Maker, at: str, a: Attention) -> AttentionArgs:
    return AttentionArgs(
        scale=a.scale,
        softcap=a.softcap,
        window=a.window,
        sinks=make.tensor(at + "sinks") if a.sinks else None,
        alibi=None if a.alibi is None else _slopes(make, at, a.alibi, a.heads),
    )


def _qk_norm(make: Maker, at: str, a: Attention) -> QKNorm | None:
    if a.qk_norm is None:
        return None
    if a.qk_norm.kind == "rms_bare":
        assert a.qk_norm_over == "head" and not a.qk_norm.bias, "a bare norm is of one head"
        # times one: kernels have a weight in every norm of heads
        q = k = NormWeight("rms", a.qk_norm.eps, make.ones(a.head_dim))
    elif a.qk_norm_over == "heads_apart":
        q = _norm_of_heads(make, at + "q_norm", a.qk_norm, a.heads)
        k = _norm_of_heads(make, at + "k_norm", a.qk_norm, a.kv_heads)
    else:
        q, k = (make.norm(at + part, a.qk_norm) for part in ("q_norm", "k_norm"))
    over = "per_head" if a.qk_norm_over == "heads_apart" else a.qk_norm_over
    return QKNorm(q, k, over=over, after_rope=a.qk_norm_after_rope)


def _normed_over_workers(
    ops: Ops, group: WorkerGroup, qkv: LinearWeight, norm: QKNorm, a: Attention, copies: int
) -> NormsOverWorkers:
    assert not norm.after_rope, "norms of whole rows come before the rotation"

    def whole(own: NormWeight, copies: int) -> NormWeight:
        weight, bias = (
            None if part is None else group.gather(part[None])[:, ::copies].flatten()
            for part in (own.weight, own.bias)
        )
        return replace(own, weight=weight, bias=bias)

    own = a.kv_heads * a.head_dim
    widths = a.heads * a.head_dim, own, own
    norms = whole(norm.q, 1), whole(norm.k, copies)
    return NormsOverWorkers(ops, group, qkv, widths, *norms, a.clip, copies)


def _norm_of_heads(make: Maker, at: str, n: Norm, heads: int) -> NormWeight:
    """One norm with a weight [H, D] of tensors [D]."""
    weights = [make.weights.tensor(f"{at}.{head}.weight") for head in range(heads)]
    weight = torch.stack(weights)
    make.keep(at + ".weight", weight)
    assert not n.bias and n.kind != "rms_bare", "norms of heads apart have weights, no biases"
    return NormWeight(n.kind, n.eps, weight)


def _qkv_norm(make: Maker, at: str, a: Attention) -> NormWeight:
    """One norm of all heads of queries, keys and values, these with a weight of 1."""
    n = a.qk_norm
    assert n is not None and n.kind == "rms_late_cast" and not n.bias and a.clip is None
    assert a.qk_norm_over == "head" and not a.qk_norm_after_rope, "a weight for a head"
    q, k = (make.weights.tensor(f"{at}{part}_norm.weight") for part in "qk")
    rows = ((q, a.heads), (k, a.kv_heads), (make.ones(a.head_dim), a.kv_heads))
    weight = torch.cat([row.expand(heads, -1) for row, heads in rows])
    make.keep(at + "qkv_norm.weight", weight)
    return NormWeight(n.kind, n.eps, weight)


def _slopes(make: Maker, at: str, alibi: Alibi, heads: int) -> Tensor:
    """The slopes of this worker's heads."""
    # slopes follow from the number of heads of the whole model
    group = make.group_of(at + "o.weight")
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    own = alibi_slopes(alibi, heads * size)[rank * heads : (rank + 1) * heads]
    return torch.tensor(own, dtype=torch.float32, device=make.device)


def tempering(make: Maker, t: Temperature | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of queries [T, H, D] and their positions that scales them."""
    if t is None:
        return lambda q, positions: q
    ops, factors = make.ops, query_factors(t, make.max_model_len).to(make.device)
    return lambda q, positions: ops.scale_queries(q, positions, factors)
