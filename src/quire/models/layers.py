"""The parts of a decoder that run: embedding, attention, feed-forward, and the residual joints
between them.

Each gets finished weights and the ops it calls; all decisions were made when it was built
(`assembly.py`). Activations go through ops only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.ops import (
    AttentionArgs,
    Batch,
    ExpertWeights,
    GroupBatch,
    LayerKV,
    LinearWeight,
    MoeArgs,
    NormWeight,
    Ops,
    QKNorm,
    RotaryTable,
)
from quire.ops.kv import BlockMemory
from quire.ops.moe import grouped_mixture

Mixer = Callable[[Tensor, Tensor, GroupBatch, Any], Tensor]
"""h [T, C], positions, the layer's KV group in this step, its memory, which is of the kind that the
mixer's spec states -> [T, C]."""
FeedForward = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Projection = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, C]."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The first stage. `look_up` turns ids [T] into the scaled rows [T, C] of a table;
    `position_table` [P, C] where positions are learned.
    """

    ops: Ops
    look_up: Callable[[Tensor], Tensor]
    position_table: Tensor | None

    def __call__(self, batch: Batch) -> Tensor:
        """Embed `batch.ids`, or take `batch.embeds` as is, plus learned positions -> [T, C]."""
        x = batch.embeds
        if x is None:
            assert batch.ids is not None, "a batch has ids or embeddings"
            x = self.look_up(batch.ids)
        if self.position_table is None:
            return x
        return self.ops.add(x, self.ops.embed(batch.positions[0], self.position_table))


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
    args: AttentionArgs

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
            clip=None,
        )
        return self.out(ops.attend(q, kv, group.plan, self.args))


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """A feed-forward part that all tokens go through."""

    ops: Ops
    up: LinearWeight
    down: Projection
    act: str
    gated: bool

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.down(self.ops.hidden(h, self.up, self.act, self.gated))


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A feed-forward part in which a router sends each token to a few experts."""

    ops: Ops
    router: LinearWeight
    experts: ExpertWeights
    args: MoeArgs

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.ops.moe(h, self.router, self.experts, self.args)


@dataclass(frozen=True, slots=True)
class DistributedExperts:
    """A mixture whose experts are distributed over cores: `exchange` sends each token to its chosen
    experts on any core (distributed/expert_exchange.py).
    """

    ops: Ops
    router: LinearWeight
    exchange: Callable[[Tensor, list[int]], Tensor]
    args: MoeArgs

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        logits = self.ops.linear(h, self.router)
        return grouped_mixture(h, logits, self.args, None, self.exchange)


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """Experts of a layer that are run one by one, each as a mixture of one: the router's logit is
    0, and its softmax over one expert is 1.
    """

    ops: Ops
    router: LinearWeight
    experts: tuple[ExpertWeights, ...]
    args: MoeArgs

    def __call__(self, expert: int, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.ops.moe(h, self.router, self.experts[expert], self.args)


@dataclass(frozen=True, slots=True)
class SharedProjection:
    """A projection whose inputs a group's workers share, heads or width: each brings the sums of
    its segments. `rounds_rows`: the weight's format rounds activations, by the whole row.
    """

    ops: Ops
    group: WorkerGroup
    weight: LinearWeight
    rounds_rows: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of this worker -> [T, C], the same on every worker."""
        ops, peaks = self.ops, None
        if self.rounds_rows:
            peaks = self.group.all_gather(ops.row_peaks(x)).amax(0)
        parts = self.group.all_gather(ops.linear_partial(x, self.weight, peaks))
        parts = parts.transpose(0, 1).flatten(1, 2)
        total: Tensor = ops.linear_total(parts, self.weight, peaks, x.dtype)
        return total


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Carries the residual stream x, and h: x made ready for the next sub-layer."""

    enter: Callable[[Tensor], Tensor]  # h for a pass that begins with this layer
    mix: Mixer
    join_mixer: Join
    feed: FeedForward
    join_feed: Join

    def __call__(
        self, x: Tensor, h: Tensor, positions: Tensor, group: GroupBatch, kv: BlockMemory | None
    ) -> tuple[Tensor, Tensor]:
        """x, h [T, C] -> x, h for the next layer."""
        x, h = self.join_mixer(x, self.mix(h, positions, group, kv))
        return self.join_feed(x, self.feed(h))


def make_look_up(
    ops: Ops, table: Tensor | LinearWeight, scale: float
) -> Callable[[Tensor], Tensor]:
    """The rows [T, C] of ids [T], in a table of their own or in the head's packed weight."""
    if isinstance(table, Tensor):
        return lambda ids: ops.embed(ids, table, scale)
    return lambda ids: ops.embed_packed(ids, table, scale)


def make_entrance(ops: Ops, pre: NormWeight | None) -> Callable[[Tensor], Tensor]:
    """Make the function from the residual stream to a sub-layer that no join precedes."""
    if pre is None:
        return lambda x: x
    return lambda x: ops.norm(x, pre)


def make_join(ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float) -> Join:
    """Make the end of a sub-layer: x plus scale * post(delta), and that sum normed by `pre` for the
    next one.
    """

    def plain(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.add(x, delta, scale)
        return total, total

    def normed(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, delta, pre, scale)

    inner = plain if pre is None else normed
    if post is None:
        return inner
    return lambda x, delta: inner(x, ops.norm(delta, post))
