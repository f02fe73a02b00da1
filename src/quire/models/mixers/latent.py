"""Multi-head latent attention as a part of a decoder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.mixers.attention import tempering
from quire.models.spec import Indexer, LatentAttention
from quire.ops import (
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
    """Chooses tokens: `heads` queries of `dim` numbers, the norm of keys, and their rotation."""

    ops: Ops
    queries: LinearWeight
    inputs: LinearWeight
    norm: NormWeight
    rotary: RotaryTable | None
    heads: int
    dim: int
    top_k: int

    def __call__(
        self, h: Tensor, q: Tensor, positions: Tensor, group: GroupBatch, latents: LayerLatents
    ) -> Tensor:
        """h [T, C] and the normed latent q of queries -> positions [T, top_k]."""
        ops, turned = self.ops, {"head_dim": self.dim, "rotary": self.rotary}
        both = ops.linear(h, self.inputs)
        k, weights = ops.norm(both[:, : self.dim], self.norm), both[:, self.dim :]
        return ops.index_select(
            ops.rope_queries(
                ops.linear(q, self.queries), positions, heads=self.heads, q_norm=None, **turned
            ),
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
            if self.indexer is not None and self.choice is not None:
                self.choice.positions = self.indexer(h, q, positions, group, latents)
            q = ops.linear(q, self.query.up)
        q = self.temper(q.unflatten(1, (self.heads, -1)), positions)
        plain, turned = q[..., : self.unrotated], q[..., self.unrotated :]
        turned = ops.latent_store(
            turned, x, latents, group.slots, positions, norm=self.norm, rotary=self.rotary
        )
        plain = ops.heads_linear(plain, self.absorb)
        if self.choice is None:
            means = ops.latent_attend(plain, turned, latents, group.plan, self.scale)
        else:
            assert self.choice.positions is not None, "an earlier layer has chosen"
            means = ops.indexed_attend(
                *(plain, turned, self.choice.positions, latents, group.plan, self.scale)
            )
        values = ops.heads_linear(means, self.values).flatten(1)
        if self.gate is not None:
            values = ops.scale_heads(values, ops.linear(h, self.gate))
        return self.out(values)


def make_latent_attention(
    make: Maker, at: str, a: LatentAttention, choice: ChosenTokens
) -> LatentAttentionLayer:
    """Build the mixer whose leaves' names begin with `at`, in their order. `choice` is that of all
    layers of a model.
    """
    first = "q" if a.q_rank is None else "q_a"
    down = make.linear(at + "q_kv_a", at + first, at + "kv_a")
    query = None
    if a.q_rank is not None:
        norm, name = make.norm(at + "q_a_norm", a.norm), at + "q_b"
        query = QueryLatent(norm, make.linear(name, name))
    indexer = None
    if a.indexer is not None and not a.indexer.is_shared:
        indexer = _indexer(make, at + "index.", a.indexer)
    gate = make.linear(at + "gate", at + "gate") if a.gate else None
    norm = make.norm(at + "kv_a_norm", a.norm)
    kv = make.weights.tensor(at + "kv_b.weight")
    kv = kv.view(a.heads, a.unrotated + a.value_dim, a.rank)
    return LatentAttentionLayer(
        ops=make.ops,
        down=down,
        query=query,
        norm=norm,
        absorb=_heads(make, at + "absorb", kv[:, : a.unrotated].transpose(1, 2)),
        values=_heads(make, at + "values", kv[:, a.unrotated :]),
        out=make.row_linear(at + "o", a.heads),
        heads=a.heads,
        unrotated=a.unrotated,
        rotary=make.rotary(a.rope),
        scale=a.scale,
        temper=tempering(make, a.temperature),
        indexer=indexer,
        choice=None if a.indexer is None else choice,
        gate=gate,
    )


def _indexer(make: Maker, at: str, indexer: Indexer) -> IndexerLayer:
    return IndexerLayer(
        ops=make.ops,
        queries=make.linear(at + "q", at + "q"),
        inputs=make.linear(at + "inputs", at + "k", at + "weights"),
        norm=make.norm(at + "k_norm", indexer.norm),
        rotary=make.rotary(indexer.rope),
        heads=indexer.heads,
        dim=indexer.dim,
        top_k=indexer.top_k,
    )


def _heads(make: Maker, name: str, weight: Tensor) -> HeadsWeight:
    """A weight [H, out, in], kept in the model's dtype under every recipe."""
    packed: HeadsWeight = make.ops.pack_heads(weight)
    make.keep(name, packed)
    return packed
