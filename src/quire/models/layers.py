"""The frame of a decoder that runs: embedding, layers of mixers and feed-forward parts, and the
residual joints between these. What is between the joints is in `mixers/` and `feed_forward/`.

Each gets finished weights and the ops it calls; all decisions were made when it was built
(`assembly.py`). Activations go through ops only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.distributed.worker_group import ProductGroup, WorkerGroup
from quire.ops import Batch, GroupBatch, LinearWeight, NormWeight, Ops, RotaryTable

Mixer = Callable[[Tensor, Tensor, Any, Any], Tensor]
"""h [T, C], positions, the mixer's KV group in this step, its memory, both of the kind that the
mixer's spec states -> [T, C]."""
SubLayer = Callable[[Tensor, Batch], Tensor]
"""h [T, C], the step -> [T, C]."""
FeedForward = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The residual stream x, the h that a sub-layer has read, and its result, [T, C] each -> x with the
result added, and the h for the next sub-layer."""
Projection = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, C]."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The first stage. `look_up` turns ids [T] into the scaled rows [T, C] of a table;
    `position_table` [P, C] where positions are learned, `type_table` [n, C] where tokens have
    types; `finish` is the norm of the result.
    `inputs` makes what layers have as inputs of their own, from ids and their rows.
    """

    ops: Ops
    look_up: Callable[[Tensor], Tensor]
    position_table: Tensor | None
    type_table: Tensor | None
    finish: Callable[[Tensor], Tensor]
    inputs: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Embed `batch.ids`, or take `batch.embeds` as is, add types and learned positions and
        normalise -> [T, C]. Sets `batch.layer_inputs` where layers have some, which needs ids.
        """
        x = batch.embeds
        if x is None:
            assert batch.ids is not None, "a batch has ids or embeddings"
            x = self.look_up(batch.ids)
        if self.inputs is not None:
            assert batch.ids is not None, "inputs of layers are looked up by ids"
            batch.layer_inputs = self.inputs(batch.ids, x)
        if self.type_table is not None:
            assert batch.token_types is not None, "the runner stages types for models with some"
            x = self.ops.add(x, self.ops.embed(batch.token_types, self.type_table))
        if self.position_table is not None:
            x = self.ops.add(x, self.ops.embed(batch.positions[0], self.position_table))
        return self.finish(x)


class StageInput:
    """The first stage of a piece of a decoder: the hidden states of the piece before."""

    def __init__(self, look_up: Callable[[Tensor], Tensor] | None = None) -> None:
        """`look_up`: as that of `Embedding`, of a piece that lends its table."""
        self._look_up = look_up

    def look_up(self, ids: Tensor) -> Tensor:
        """The embeddings [T, C] of ids [T]."""
        assert self._look_up is not None, "a piece without the embedding"
        return self._look_up(ids)

    def __call__(self, batch: Batch) -> Tensor:
        """Return `batch.states` [T, C]."""
        assert batch.states is not None, "a later piece of a decoder reads states"
        return batch.states


class AxisMixer:
    """Makes a step's rotary table of positions on several axes, once for all layers."""

    def __init__(self, ops: Ops, table: RotaryTable, axes: Tensor) -> None:
        """`table` is of single positions; axes [dim / 2] int64: see `Rope`."""
        self._ops, self._table, self._axes = ops, table, axes
        self._entries = torch.zeros((1, 0), dtype=torch.int64, device=axes.device)

    def __call__(self, batch: Batch) -> Batch:
        """The step as layers read it: with the table, if there are several axes, and positions that
        are entries of it. The step itself stays, since steps of decodes are used again.
        """
        rotary = None
        if len(batch.positions) > 1:
            count = batch.positions.shape[1]
            mixed = self._ops.mix_axes(batch.positions, self._table.cos_sin, self._axes)
            rotary = replace(self._table, cos_sin=mixed)
            if self._entries.shape[1] < count:
                self._entries = torch.arange(count, device=self._axes.device)[None]
            batch = replace(batch, positions=self._entries[:, :count])
        for group in batch.groups:
            if isinstance(group, GroupBatch):
                group.rotary = rotary
        return batch


@dataclass(frozen=True, slots=True)
class PlacedMixer:
    """A mixer with the place of its memory among those of the pool."""

    mix: Mixer
    place: int

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]; writes this step's part of the memory."""
        group = batch.groups[batch.layer_groups[self.place]]
        return self.mix(h, batch.positions, group, batch.kv[self.place])


@dataclass(frozen=True, slots=True)
class SumOfMixers:
    """Mixers that read the same input."""

    ops: Ops
    mixers: tuple[PlacedMixer, ...]

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]."""
        total, *others = (mix(h, batch) for mix in self.mixers)
        for other in others:
            total = self.ops.add(total, other)
        return total


@dataclass(slots=True)
class StepIds:
    """The token ids [T] of the step that is computed, for parts that look something up by them."""

    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PlacedFeedForward:
    """A feed-forward part as a sub-layer. `reads`: where it finds the ids of the step."""

    feed: FeedForward
    reads: StepIds | None = None

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]."""
        if self.reads is not None:
            assert batch.ids is not None, "experts are looked up by ids"
            self.reads.ids = batch.ids
        return self.feed(h)


@dataclass(frozen=True, slots=True)
class SharedProjection:
    """A projection whose inputs a group's workers share, heads or width: each brings the sum of
    its part. `needs_peaks`: the weight's format rounds activations, by the whole row.
    """

    ops: Ops
    group: WorkerGroup
    weight: LinearWeight
    needs_peaks: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] of this worker -> [T, C], the same on every worker."""
        peaks = self.peaks(x)
        if isinstance(self.group, ProductGroup):
            whole = self.group.product(x, self.weight, peaks)
            if whole is not None:
                return whole
        return self.ops.linear_total(self.parts(x, peaks), self.weight, peaks, x.dtype)

    def peaks(self, x: Tensor) -> Tensor | None:
        """The peaks of the whole rows, where the product needs them."""
        return self.group.largest(self.ops.row_peaks(x)) if self.needs_peaks else None

    def parts(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """The sums of all workers' parts [T, size, C]."""
        return self.group.gather(self.ops.linear_partial(x, self.weight, peaks))


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Carries the residual stream x, and h: x made ready for the next sub-layer."""

    enter: Callable[[Tensor], Tensor]  # h for a pass that begins with this layer
    parts: tuple[tuple[SubLayer, Join], ...]

    def __call__(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x, h [T, C] -> x, h for the next layer."""
        for part, join in self.parts:
            x, h = join(x, h, part(h, batch))
        return x, h


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


def make_projected(
    ops: Ops, enter: Callable[[Tensor], Tensor], weight: LinearWeight
) -> Callable[[Tensor], Tensor]:
    """Make the function of a table's rows: `enter`, and a product as wide as the residual."""
    return lambda x: ops.linear(enter(x), weight)


def make_join(ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float) -> Join:
    """Make the end of a sub-layer: x + scale * post(delta), normed by `pre` for the next one."""

    def plain(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.add(x, delta, scale)
        return total, total

    def normed(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, delta, pre, scale)

    return _after_norm(ops, post, plain if pre is None else normed)


def make_normed_join(
    ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float
) -> Join:
    """Make the end of a sub-layer whose sum is normed by `post` and goes on as the residual stream;
    `pre` norms it once more for the next sub-layer.
    """

    def join(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        _, total = ops.add_norm(x, delta, post, scale)
        return total, total if pre is None else ops.norm(total, pre)

    return join


def make_scaled_join(
    ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float, factor: Tensor
) -> Join:
    """Make the end of a layer whose result is multiplied with a learned `factor` [1]."""

    def join(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.multiply(ops.add(x, delta, scale), factor)
        return total, total if pre is None else ops.norm(total, pre)

    return _after_norm(ops, post, join)


def make_parallel_join(
    ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float
) -> Join:
    """Make the end of a parallel block's mixer: the next part reads the same x, or `pre` of it."""

    def shared(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add(x, delta, scale), h

    def normed(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add(x, delta, scale), ops.norm(x, pre)

    return _after_norm(ops, post, shared if pre is None else normed)


def make_input_join(
    ops: Ops, post: NormWeight | None, pre: NormWeight | None, scale: float
) -> Join:
    """Make the end of a part whose result is added to the next one's input alone."""

    def join(x: Tensor, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.add(x, delta, scale)
        return x, total if pre is None else ops.norm(total, pre)

    return _after_norm(ops, post, join)


def _after_norm(ops: Ops, post: NormWeight | None, join: Join) -> Join:
    if post is None:
        return join
    return lambda x, h, delta: join(x, h, ops.norm(delta, post))
