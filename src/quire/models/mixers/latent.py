"""Multi-head latent attention as a part of a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.layers import PlacedMixer, Projection
from quire.models.maker import Maker
from quire.models.mixers.attention import tempering
from quire.models.positions import LearnedTemperature, Temperature
from quire.models.spec import Indexer, LatentAttention
from quire.ops import (
    Batch,
    GroupBatch,
    HeadsWeight,
    LayerLatents,
    LinearWeight,
    NormWeight,
    Ops,
    RotaryTable,
)


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """Queries from a latent of their own: its norm, and the product that makes all heads of it."""

    norm: NormWeight
    up: LinearWeight


@dataclass(slots=True)
class ChosenTokens:
    """The positions [T, top_k] that the last indexer has chosen in the step that is computed: what
    layers without an indexer of their own attend to as well.
    """

    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexerLayer:
    """Chooses tokens: `heads` queries of `dim` numbers, the norm of keys, and their rotation.
    `query_norm`: queries are made of the normed hidden states, and not of their latent.
    """

    ops: Ops
    query_norm: NormWeight | None
    queries: LinearWeight
    inputs: LinearWeight
    norm: NormWeight
    rotary: RotaryTable | None
    heads: int
    dim: int
    top_k: int
    temper: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self, h: Tensor, q: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] and the normed latent q of queries -> positions [T, top_k]."""
        ops, turned = self.ops, {"head_dim": self.dim, "rotary": self.rotary}
        both = ops.linear(h, self.inputs)
        k, weights = ops.norm(both[:, : self.dim], self.norm), both[:, self.dim :]
        if self.query_norm is not None:
            q = ops.norm(h, self.query_norm)
        q = ops.linear(q, self.queries).unflatten(1, (self.heads, self.dim))
        q = self.temper(q, positions).flatten(1)
        return ops.index_select(
            ops.rope_queries(q, positions, heads=self.heads, q_norm=None, **turned),
            ops.rope_queries(k, positions, heads=1, q_norm=None, **turned)[:, 0],
            weights,
            latents,
            group.slots,
            group.plan,
            self.top_k,
        )


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    """Attention over latents: project, store, take the heads' key weights into the queries, attend,
    make the heads' values of the means, project.

    `down` makes the queries or their latent, and then the stored latent and its rotated key. With a
    `choice`, queries attend to what the `indexer` has put there, or that of an earlier layer.
    """

    ops: Ops
    down: LinearWeight
    query: QueryLatent | None
    norm: NormWeight
    absorb: HeadsWeight
    values: HeadsWeight
    out: Projection
    heads: int
    unrotated: int
    rotary: RotaryTable | None
    scale: float
    temper: Callable[[Tensor, Tensor], Tensor]
    indexer: IndexerLayer | None = None
    choice: ChosenTokens | None = None
    gate: LinearWeight | None = None

    def __call__(
        self, h: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's latents into `latents`."""
        ops = self.ops
        both = ops.linear(h, self.down)
        width = both.shape[1] - latents.width
        q, x = both[:, :width], both[:, width:]
        if self.query is not None:
            q = ops.norm(q, self.query.norm)
        # between the norm and the product: the indexer makes its queries of the same normed latent
        if self.indexer is not None and self.choice is not None:
            self.choice.positions = self.indexer(h, q, positions, group, latents)
        if self.query is not None:
            q = ops.linear(q, self.query.up)
        q = self.temper(q.unflatten(1, (self.heads, -1)), positions)
        plain, turned = q[..., : self.unrotated], q[..., self.unrotated :]
        turned = ops.latent_store(
            turned, x, latents, group.slots, positions, norm=self.norm, rotary=self.rotary
        )
        plain = ops.heads_linear(plain, self.absorb)
        means = _attend(ops, plain, turned, self.choice, latents, group, self.scale)
        values = ops.heads_linear(means, self.values).flatten(1)
        if self.gate is not None:
            values = ops.scale_heads(values, ops.linear(h, self.gate))
        return self.out(values)


@dataclass(frozen=True, slots=True)
class SharedLatentLayer:
    """Attention over the latents of another layer, whose memory it is called with. `queries` makes
    what is not rotated of all heads, and then what is.
    """

    ops: Ops
    queries: LinearWeight
    absorb: HeadsWeight
    values: HeadsWeight
    out: Projection
    heads: int
    unrotated: int
    rotated: int
    rotary: RotaryTable | None
    scale: float
    temper: Callable[[Tensor, Tensor], Tensor]
    choice: ChosenTokens | None

    def __call__(
        self, h: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] -> [T, C]; the other layer has written this step's latents."""
        ops = self.ops
        q = self.temper(ops.linear(h, self.queries)[:, None], positions).flatten(1)
        border = self.heads * self.unrotated
        plain = q[:, :border].unflatten(1, (self.heads, self.unrotated))
        turned = q[:, border:].unflatten(1, (self.heads, self.rotated))
        if self.rotary is not None:
            turned = ops.rope_queries(
                q[:, border:],
                positions,
                heads=self.heads,
                head_dim=self.rotated,
                rotary=self.rotary,
                q_norm=None,
            )
        plain = ops.heads_linear(plain, self.absorb)
        means = _attend(ops, plain, turned, self.choice, latents, group, self.scale)
        return self.out(ops.heads_linear(means, self.values).flatten(1))


def _attend(
    ops: Ops,
    plain: Tensor,
    turned: Tensor,
    choice: ChosenTokens | None,
    latents: LayerLatents,
    group: GroupBatch,
    scale: float,
) -> Tensor:
    if choice is None:
        return ops.latent_attend(plain, turned, latents, group.plan, scale)
    assert choice.positions is not None, "an earlier layer has chosen"
    return ops.indexed_attend(plain, turned, choice.positions, latents, group.plan, scale)


@dataclass(frozen=True, slots=True)
class ChoiceBefore:
    """A layer over another one's latents, after an indexer with keys at a place of its own."""

    indexer: IndexerLayer
    place: int
    choice: ChosenTokens
    attention: PlacedMixer

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]."""
        group, memory = batch.groups[batch.layer_groups[self.place]], batch.kv[self.place]
        assert isinstance(group, GroupBatch) and isinstance(memory, LayerLatents), "rows of keys"
        self.choice.positions = self.indexer(h, h, batch.positions, group, memory)
        return self.attention(h, batch)


def make_latent_attention(
    make: Maker, at: str, a: LatentAttention, choice: ChosenTokens
) -> LatentAttentionLayer:
    """Build the mixer of leaves below `at`, in order. `choice`: that of all layers."""
    first = "q" if a.q_rank is None else "q_a"
    down = make.linear(at + "q_kv_a", at + first, at + "kv_a")
    query = None
    if a.q_rank is not None:
        norm, name = make.norm(at + "q_a_norm", a.norm), at + "q_b"
        query = QueryLatent(norm, make.linear(name, name))
    indexer = None
    if a.indexer is not None and a.chooses:
        indexer = make_indexer(make, at + "index.", a.indexer)
    gate = make.linear(at + "gate", at + "gate") if a.gate else None
    norm = make.norm(at + "kv_a_norm", a.norm)
    absorb, values = _halves(make, at, a)
    return LatentAttentionLayer(
        ops=make.ops,
        down=down,
        query=query,
        norm=norm,
        absorb=absorb,
        values=values,
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        unrotated=a.unrotated,
        rotary=make.rotary(a.rope),
        scale=a.scale,
        temper=_tempering(make, at + "temper.", a.temperature, a.unrotated + a.rotated),
        indexer=indexer,
        choice=None if a.indexer is None else choice,
        gate=gate,
    )


def make_shared_latents(
    make: Maker, at: str, a: LatentAttention, choice: ChosenTokens
) -> SharedLatentLayer:
    """Build a mixer over the latents of another layer."""
    assert a.q_rank is None and not a.gate, "queries of the hidden states alone"

    def in_parts(rows: Tensor) -> Tensor:
        # columns that are rotated lie side by side: a recorded step cannot copy them together
        by_head = rows.unflatten(0, (a.heads, -1))
        parts = by_head[:, : a.unrotated], by_head[:, a.unrotated :]
        return torch.cat([part.flatten(0, 1) for part in parts])

    queries = make.linear(at + "q", at + "q", change=in_parts)
    absorb, values = _halves(make, at, a)
    return SharedLatentLayer(
        ops=make.ops,
        queries=queries,
        absorb=absorb,
        values=values,
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        unrotated=a.unrotated,
        rotated=a.rotated,
        rotary=make.rotary(a.rope),
        scale=a.scale,
        temper=_tempering(make, at + "temper.", a.temperature, a.unrotated, a.rotated),
        choice=None if a.indexer is None else choice,
    )


def make_indexer(make: Maker, at: str, indexer: Indexer) -> IndexerLayer:
    """Build the indexer whose leaves' names begin with `at`."""
    query_norm = None
    if indexer.query_norm is not None:
        query_norm = make.norm(at + "q_norm", indexer.query_norm)
    return IndexerLayer(
        ops=make.ops,
        query_norm=query_norm,
        queries=make.linear(at + "q", at + "q"),
        inputs=make.linear(at + "inputs", at + "k", at + "weights"),
        norm=make.norm(at + "k_norm", indexer.norm),
        rotary=make.rotary(indexer.rope),
        heads=indexer.heads,
        dim=indexer.dim,
        top_k=indexer.top_k,
        temper=_tempering(make, at + "temper.", indexer.temperature, indexer.dim),
    )


def _tempering(
    make: Maker, at: str, t: Temperature | LearnedTemperature | None, *widths: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of queries and their positions that scales them: [T, H, D], of one width, or
    [T, 1, H * (D + E)], of the heads' first D numbers and then of their other E.
    """
    if not isinstance(t, LearnedTemperature):
        return tempering(make, t)

    def for_each(numbers: Tensor) -> Tensor:
        return torch.cat([numbers.repeat_interleave(width) for width in widths])

    ops, logs = make.ops, make.log_positions()
    scale, bias = (make.tensor(at + part, change=for_each) for part in ("scale", "bias"))

    def tempered(q: Tensor, positions: Tensor) -> Tensor:
        grown = ops.multiply(ops.scale_queries(q, positions, logs).flatten(1), scale)
        return ops.add(grown, ops.multiply(q.flatten(1), bias)).view(q.shape)

    return tempered


def _halves(make: Maker, at: str, a: LatentAttention) -> tuple[HeadsWeight, HeadsWeight]:
    """The heads' key weights and value weights."""
    kv = make.weights.tensor(at + "kv_b.weight")
    kv = kv.view(a.heads, a.unrotated + a.value_dim, a.rank)
    return (
        # q . (W c) = (W^T q) . c: with keys' weights in the queries, scores are products with what
        # is stored
        _heads(make, at + "absorb", kv[:, : a.unrotated].transpose(1, 2)),
        _heads(make, at + "values", kv[:, a.unrotated :]),
    )


def _heads(make: Maker, name: str, weight: Tensor) -> HeadsWeight:
    """A weight [H, out, in], kept in the model's dtype under every recipe."""
    packed: HeadsWeight = make.ops.pack_heads(weight)
    make.keep(name, packed)
    return packed
