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
    GroupBatch,
    LayerKV,
    LinearWeight,
    NormWeight,
    Ops,
    QKNorm,
    RotaryTable,
)
from quire.ops.kv import BlockMemory

Mixer = Callable[[Tensor, Tensor, GroupBatch, Any], Tensor]
"""h [T, C], positions, the layer's KV group in this step, its memory, which is of the kind that the
mixer's spec states -> [T, C]."""
FeedForward = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The residual stream x, the h that a sub-layer has read, and its result, [T, C] each -> x with the
result added, and the h for the next sub-layer."""
Projection = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, C]."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The first stage. `look_up` turns ids [T] into the scaled rows [T, C] of a table;
    `position_table` [P, C] where positions are learned; `finish` is the norm of the result.
    """

    ops: Ops
    look_up: Callable[[Tensor], Tensor]
    position_table: Tensor | None
    finish: Callable[[Tensor], Tensor]

    def __call__(self, batch: Batch) -> Tensor:
        """Embed `batch.ids`, or take `batch.embeds` as is, add learned positions and normalise ->
        [T, C].
        """
        x = batch.embeds
        if x is None:
            assert batch.ids is not None, "a batch has ids or embeddings"
            x = self.look_up(batch.ids)
        if self.position_table is not None:
            x = self.ops.add(x, self.ops.embed(batch.positions[0], self.position_table))
        return self.finish(x)


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
class XieluFeedForward:
    """A feed-forward part whose activation has learned numbers [4], see `ops.xielu`."""

    ops: Ops
    up: LinearWeight
    down: Projection
    numbers: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.down(self.ops.xielu(self.ops.linear(h, self.up), self.numbers))


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
        x, h = self.join_mixer(x, h, self.mix(h, positions, group, kv))
        return self.join_feed(x, h, self.feed(h))


def make_temper(ops: Ops, factors: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the function of queries [T, H, D] and their positions that scales them by `factors`."""
    if factors is None:
        return lambda q, positions: q
    return lambda q, positions: ops.scale_queries(q, positions, factors)


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

    def plain(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.add(x, delta, scale)
        return total, total

    def normed(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, delta, pre, scale)

    return _after_norm(ops, post, plain if pre is None else normed)


def make_parallel_join(
    ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float
) -> Join:
    """Make the end of a mixer in a parallel block: the feed-forward part reads what the mixer has
    read, or the same x normed by `pre`.
    """

    def shared(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add(x, delta, scale), h

    def normed(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add(x, delta, scale), ops.norm(x, pre)

    return _after_norm(ops, post, shared if pre is None else normed)


def _after_norm(ops: Ops, post: NormWeight | None, join: Join) -> Join:
    if post is None:
        return join
    return lambda x, h, delta: join(x, h, ops.norm(delta, post))
