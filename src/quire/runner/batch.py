"""Builds the tensors of a step from a plan and the rows.

The tensors live as long as the runner, and each step fills their first entries. So a recorded
program finds them at the same addresses, and a steady decode allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.models.kv_pool import KVGroup, KVPool
from quire.models.layer_memory import KeyValues
from quire.ops import (
    NO_BLOCK,
    PAD_SLOT,
    AttentionPlan,
    Batch,
    GroupBatch,
    LayerBatch,
    Ops,
    PromptBatch,
    StateBatch,
)
from quire.ops.attention import SpanPlan
from quire.ops.kv import BlockMemory
from quire.ops.mixers.spans import Span, cut_at_spans
from quire.ops.step_rows import StepRows, cut_at_chunks
from quire.runner.devices.device import Array, Device
from quire.runner.token_types import TokenTypes
from quire.step.plan import StepPlan


@dataclass(slots=True)
class StepInputs:
    """A step's tensors for the model, and what the rest of the step needs on the host.

    `rows` [R] and `counts` [R]: the scheduled rows in order and their tokens; `starts` [R+1]: where
    each row's tokens begin among the T. `sampled` [M]: the rows that get a token, at `positions`
    [M] of their ids; a row with d drafts occurs d+1 times, for the token after its known ones and
    after each draft, and `drafts` has d for each row that samples (None: no row has any). `last`
    [M], on the device: the indices of the hidden states from which tokens are drawn, None if they
    are 0 .. M-1. Also on the device: `sampled_rows` and `sampled_at`, the values of `sampled` and
    `positions`, and `token_rows` and `token_positions` [T], where each token's id is stored. The
    batch may have more tokens than the rows: padding at the end. Tensors and `positions` are valid
    until the next step is built, the others as long as they are held.
    """

    batch: Batch
    rows: Array
    counts: Array
    starts: Array
    sampled: Array
    positions: Array
    drafts: Array | None
    last: Tensor | None
    sampled_rows: Tensor
    sampled_at: Tensor
    token_rows: Tensor
    token_positions: Tensor


@dataclass(slots=True)
class _Layout:
    """Rows and their numbers of tokens; steps of a steady decode share one layout.

    For each token, including padding: `row_of_token`, and `offsets`, how many tokens of this step
    its row has before it (None: always 0). For each token to be drawn: `ahead`, how many drafts are
    before it (None: always 0). Attention reads `query_start`, `seq_lens` and
    `table_rows`, the rows' places in the block tables. `state_places`: for each token after which
    the recurrent state is kept, how many places further in the ring (0: it is not kept). `arrays`
    begin every such step. `adapter_slots`: where the slots of adapters are on the device; None:
    rows have none.
    """

    inputs: StepInputs
    row_of_token: Array
    offsets: Array | None
    ahead: Array | None
    query_start: Array
    seq_lens: Array
    table_rows: Array
    state_places: Array
    arrays: list[Array]
    adapter_slots: Tensor | None


class RowLengths(Protocol):
    """The rows that a model computes, see `Rows`: where their ids and blocks are, and how far this
    model is in each.
    """

    pad_row: int
    ring_size: int
    block_sizes: list[int | None]
    token_ids: Tensor
    tables: list[Array]
    device_tables: list[Tensor]
    num_tokens: Array
    num_computed: Array
    state_index: Array
    adapter_slots: Array
    position_offsets: Array
    prompt_positions: dict[int, Array]
    spans: dict[int, list[Span]]


class BatchBuilder:
    """Builds `StepInputs` for the models of a pool, whose layers have their memory in `kv`."""

    def __init__(
        self,
        *,
        rows: RowLengths,
        ops: Ops,
        device: Device,
        pool: KVPool,
        kv: list[BlockMemory | None],
        capacity: int,
        sizes: Sequence[int] = (),
        types: TokenTypes | None = None,
        has_adapters: bool = False,
        ahead: int = 0,
        states: Tensor | None = None,
        embeds: Tensor | None = None,
        deep: Sequence[Tensor] = (),
        axes: int = 1,
    ) -> None:
        """capacity: the most tokens of a step. sizes, ascending: the row counts to which a step of
        only decodes is padded; (): no padding. types: of tokens, where the model has some.
        has_adapters: rows may have adapters. ahead: how many positions further the ids that the
        model reads are. states [max(capacity, sizes), n*C]: the hidden states that a draft
        network reads; their owner fills them. embeds [capacity, C]: the embeddings of steps with
        media, and deep, as many each (see `Batch`); their owner fills them, too. axes: on how
        many a token has a position.
        """
        self._rows = rows
        self._device = device
        self._sizes = sizes
        self._groups = pool.groups
        self._types = types
        self._ahead = ahead
        width = max([capacity, *sizes])
        self._positions = np.zeros(width, dtype=np.int64)
        self._arrays = [_group_arrays(group, width) for group in pool.groups]
        self._type_arrays = [] if types is None else [np.zeros(width, dtype=np.int64)]
        self._slot_arrays = [np.zeros(width, dtype=np.int32)] if has_adapters else []
        self._axes_arrays = [np.zeros((width, axes), dtype=np.int64)] if axes > 1 else []
        most_rows = max([len(rows.num_tokens), *sizes])
        self._seq_lens = np.zeros(most_rows, dtype=np.int32)
        self._sampled_at = np.zeros(max(most_rows, width), dtype=np.int64)
        places = device.places(self._per_token)
        of_axes = len(self._axes_arrays)
        of_types = len(self._type_arrays)
        self.capacity_batch = Batch(
            ids=torch.zeros(width, dtype=torch.int64, device=device.torch),
            embeds=embeds,
            deep=tuple(deep),
            positions=places[1].T if of_axes else places[0][None],
            groups=_group_batches(
                pool.groups,
                places[1 + of_axes + of_types :],
                [
                    None if group.kind == "state" else _empty_plan(ops, pool, group, device)
                    for group in pool.groups
                ],
            ),
            kv=kv,
            layer_groups=pool.layer_groups,
            num_tokens=capacity,
            token_types=places[1 + of_axes] if of_types else None,
            adapter_slots=places[-1] if has_adapters else None,
            states=states,
        )
        """The whole tensors, whose first entries a step uses; attention plans that are changed in
        place are the steps' own.
        """
        # A steady decode comes with the same list every step.
        self._decode_list: Sequence[int] | None = None
        self._layout: _Layout | None = None

    @property
    def _per_token(self) -> list[Array]:
        """The arrays with an entry per token: places in their rows, positions on several axes,
        types, those of each group, and the slots of adapters.
        """
        of_groups = [array for own in self._arrays for array in own]
        of_tokens = [self._positions, *self._axes_arrays, *self._type_arrays]
        return [*of_tokens, *of_groups, *self._slot_arrays]

    def build(self, plan: StepPlan) -> StepInputs:
        """Build the tensors of the plan's tokens; the rows must be up to date. Begins a step of the
        device; `gather` completes it when everything that the step needs is staged.
        """
        layout = self._layout
        is_plain = not plan.chunks and plan.decode_drafts is None
        if layout is None or not is_plain or not self._has_layout_of(plan.decode_rows):
            layout = self._layout = self._lay_out(plan)
            self._decode_list = plan.decode_rows if is_plain else None
        self._fill(layout)
        return layout.inputs

    def _has_layout_of(self, decode_rows: Sequence[int]) -> bool:
        # the scheduler makes a new list when a row comes or goes; a plan that came as a message has
        # one of its own in every step
        return decode_rows is self._decode_list or decode_rows == self._decode_list

    def padding(self, size: int) -> Batch:
        """A step of only padding, at the addresses of decode steps that are padded to this size,
        with the slots of adapters if rows may have some.
        """
        no_rows = np.zeros(0, dtype=np.int64)
        layout = self._layout_of(no_rows, no_rows, np.zeros(1, dtype=np.int64), no_rows, None, size)
        self._fill(layout)
        self.gather(layout.inputs)
        return replace(layout.inputs.batch, adapter_slots=layout.adapter_slots)

    def gather(self, inputs: StepInputs) -> None:
        """Send what is staged, and gather the tokens' ids on the device, since the newest may exist
        only there.
        """
        # one copy to the device for all that was staged, by the batch and by the heads
        self._device.flush()
        batch = inputs.batch
        assert batch.ids is not None
        table = self._rows.token_ids
        positions = inputs.token_positions
        if self._ahead:
            positions = positions + self._ahead
        self._device.take(table, inputs.token_rows, positions, batch.ids)

    def _lay_out(self, plan: StepPlan) -> _Layout:
        decode = np.asarray(plan.decode_rows, dtype=np.int64)
        if not plan.chunks and plan.decode_drafts is None:
            counts = np.ones(len(decode), dtype=np.int64)
            starts = np.arange(len(decode) + 1)
            return self._layout_of(decode, counts, starts, decode, None)
        chunks = plan.chunks
        rows = np.concatenate([decode, [chunk.row for chunk in chunks]]).astype(np.int64)
        counts = np.ones(len(rows), dtype=np.int64)
        if plan.decode_drafts is not None:
            counts[: len(decode)] += plan.decode_drafts
        counts[len(decode) :] = [chunk.num_tokens for chunk in chunks]
        starts = np.concatenate([[0], np.cumsum(counts)])
        samples = np.ones(len(rows), dtype=bool)
        samples[len(decode) :] = [chunk.samples for chunk in chunks]
        sampled, last = rows[samples], starts[1:][samples] - 1
        # drafts that a plan allows for and rows do not have are the same step as one without
        has_drafts = plan.decode_drafts is not None or any(chunk.num_drafts for chunk in chunks)
        drafts = np.array(plan.sampled_drafts if has_drafts else (), dtype=np.int64)
        if not drafts.any():
            return self._layout_of(rows, counts, starts, sampled, last)
        return self._layout_of(rows, counts, starts, sampled, last, samples=samples, drafts=drafts)

    def _layout_of(
        self,
        rows: Array,
        counts: Array,
        starts: Array,
        sampled: Array,
        last: Array | None,
        size: int = 0,
        samples: Array | None = None,
        drafts: Array | None = None,
    ) -> _Layout:
        """size: the least number of rows of a decode step; missing rows are padding. samples [R]:
        which rows sample; drafts: how many each of them has.
        """
        row_drafts, ahead = np.zeros(len(rows), dtype=np.int64), None
        if drafts is not None:
            assert samples is not None and last is not None
            ahead = _ranges(drafts + 1)
            last = np.repeat(last - drafts, drafts + 1) + ahead
            sampled = np.repeat(sampled, drafts + 1)
            row_drafts[samples] = drafts
        if last is None:
            row_of_token, offsets = self._padded(rows, size), None
            query_start, table_rows = np.arange(len(row_of_token) + 1), row_of_token
            sampled_at = self._sampled_at[: len(row_of_token)]
            extra = []
        else:
            row_of_token = np.repeat(rows, counts)
            offsets = _ranges(counts)
            query_start, table_rows = starts, rows
            sampled_at = self._sampled_at[: len(sampled)]
            extra = [sampled, last]
        num_tokens = len(row_of_token)
        arrays = [array[:num_tokens] for array in self._per_token]
        arrays += [row_of_token, sampled_at, *extra]
        places = self._device.places(arrays)
        num_of_tokens = len(self._per_token)
        token_rows, at_device, *rest = places[num_of_tokens:]
        inputs = StepInputs(
            self._batch(places[:num_of_tokens]),
            rows,
            counts,
            starts,
            sampled,
            sampled_at[: len(sampled)],
            drafts,
            last=rest[1] if rest else None,
            token_rows=token_rows,
            token_positions=places[0],
            sampled_rows=rest[0] if rest else token_rows[: len(sampled)],
            sampled_at=at_device[: len(sampled)],
        )
        return _Layout(
            inputs,
            row_of_token,
            offsets,
            ahead,
            query_start=query_start.astype(np.int32),
            seq_lens=self._seq_lens[: len(table_rows)],
            table_rows=table_rows.astype(np.int32),
            state_places=_state_places(counts, row_drafts, num_tokens),
            arrays=arrays,
            adapter_slots=inputs.batch.adapter_slots,
        )

    def _padded(self, rows: Array, least: int) -> Array:
        """The rows of a step of only decodes, padded up to the next size."""
        wanted = max(len(rows), least)
        # graphs are recorded for a few sizes; larger steps run as they are
        size = next((size for size in self._sizes if size >= wanted), wanted)
        return np.pad(rows, (0, size - len(rows)), constant_values=self._rows.pad_row)

    def _batch(self, places: Sequence[Tensor]) -> Batch:
        """A step's part of the whole batch; places: tensors of positions, types, groups."""
        whole, num_tokens = self.capacity_batch, len(places[0])
        of_axes, of_types = len(self._axes_arrays), len(self._type_arrays)
        assert whole.ids is not None
        return Batch(
            ids=whole.ids[:num_tokens],
            embeds=None,
            positions=places[1].T if of_axes else places[0][None],
            groups=_group_batches(
                self._groups,
                places[1 + of_axes + of_types :],
                [None if isinstance(group, StateBatch) else group.plan for group in whole.groups],
            ),
            kv=whole.kv,
            layer_groups=whole.layer_groups,
            num_tokens=num_tokens,
            token_types=places[1 + of_axes] if of_types else None,
            adapter_slots=places[-1] if self._slot_arrays else None,
            states=None if whole.states is None else whole.states[:num_tokens],
        )

    def _fill(self, layout: _Layout) -> None:
        """Write this step's positions, slots and lengths, and stage them."""
        rows, inputs = self._rows, layout.inputs
        computed = rows.num_computed
        positions = layout.arrays[0]
        positions[:] = computed[layout.row_of_token]
        if layout.offsets is not None:
            positions += layout.offsets
        # noise and penalties depend on the place in the text and not on the step: a resumed request
        # draws the same
        inputs.positions[:] = rows.num_tokens[inputs.sampled]
        if layout.ahead is not None:
            inputs.positions[:] += layout.ahead
        num_rows = len(inputs.rows)
        ends = computed[inputs.rows] + inputs.counts
        if num_rows == len(layout.seq_lens):
            layout.seq_lens[:] = ends
        else:
            layout.seq_lens[:num_rows] = ends
            layout.seq_lens[num_rows:] = 1  # padding sees one token of the null block
        if layout.adapter_slots is not None:
            self._fill_slots(layout, layout.adapter_slots)
        if self._axes_arrays:
            self._fill_axes(layout, positions)
        if self._types is not None:
            types = layout.arrays[1 + len(self._axes_arrays)]
            self._types.fill(types, layout.row_of_token, positions)
        self._fill_places(layout, positions)
        self._device.begin(layout.arrays)
        spans = None
        if layout.offsets is not None and rows.spans:
            spans = cut_at_spans(layout.query_start, layout.seq_lens, layout.table_rows, rows.spans)
        for table, on_device, group, kind in zip(
            rows.tables, rows.device_tables, inputs.batch.groups, self._groups, strict=True
        ):
            if isinstance(group, StateBatch):
                continue
            step = StepRows(
                layout.query_start, layout.seq_lens, table, layout.table_rows, on_device
            )
            if kind.chunk is not None:
                cut = cut_at_chunks(step, block_size=kind.block_size, chunk=kind.chunk)
                group.plan = group.plan.refill(cut)
            elif spans is not None and not kind.ignores_spans:
                assert isinstance(group.plan, SpanPlan), "planning asks for such providers"
                starts, ends, of_table, whole = spans
                pieces = StepRows(starts, ends, table, of_table)
                group.plan = group.plan.refill_spans(pieces, whole)
            else:
                group.plan = group.plan.refill(step)

    def _fill_slots(self, layout: _Layout, on_device: Tensor) -> None:
        """Write the slots of the tokens' adapters, where there are any."""
        slots = self._slot_arrays[0][: len(layout.row_of_token)]
        slots[:] = self._rows.adapter_slots[layout.row_of_token]
        # None chooses the program without adapters, which costs what a model without any costs
        layout.inputs.batch.adapter_slots = on_device if slots.max(initial=-1) >= 0 else None

    def _fill_axes(self, layout: _Layout, places: Array) -> None:
        """Write the tokens' positions on several axes: those that a prompt came with, and after
        them the tokens' places plus their rows' offsets.
        """
        rows, inputs, axes = self._rows, layout.inputs, layout.arrays[1]
        axes[:] = (places + rows.position_offsets[layout.row_of_token])[:, None]
        if not rows.prompt_positions:
            return
        for row, start, count in zip(inputs.rows, inputs.starts, inputs.counts, strict=False):
            given = rows.prompt_positions.get(int(row))
            first = int(rows.num_computed[row])
            if given is not None and first < given.shape[1]:
                there = given[:, first : first + int(count)]
                axes[start : start + there.shape[1]] = there.T

    def _fill_places(self, layout: _Layout, positions: Array) -> None:
        """Write, for each group, where its memory of the tokens is."""
        rows, num_padding = self._rows, len(layout.table_rows) - len(layout.inputs.rows)
        size = 0
        for arrays, table, its_size in zip(
            self._arrays, rows.tables, rows.block_sizes, strict=True
        ):
            if not arrays:
                continue
            if its_size is None:
                self._fill_states(layout, table, *arrays)
                continue
            # most models have one block size in all groups, and division is the dear part
            if its_size != size:
                size = its_size
                places, within = np.divmod(positions, size)
            into = arrays[0][: len(positions)]
            np.multiply(table[layout.row_of_token, places], size, out=into, dtype=np.int64)
            into += within
            if num_padding:
                # nowhere: what padding computes is not kept
                into[-num_padding:] = PAD_SLOT

    def _fill_states(self, layout: _Layout, ring: Array, reads: Array, writes: Array) -> None:
        """Write where rows find their state and where they keep it; padding reads the null block,
        whose state is zero.
        """
        rows, of_token, further = self._rows, layout.row_of_token, layout.state_places
        size, index = rows.ring_size, rows.state_index
        first = layout.query_start[:-1]
        reads[: len(of_token)] = NO_BLOCK
        reads[first] = ring[layout.table_rows, index[layout.table_rows] % size]
        kept = ring[of_token, (index[of_token] + further) % size]
        writes[: len(of_token)] = np.where(further > 0, kept, NO_BLOCK)


def _group_arrays(group: KVGroup, width: int) -> list[Array]:
    """The arrays with an entry per token that a group has in a batch."""
    count = {"state": 2, "none": 0}.get(group.kind, 1)
    return [np.zeros(width, dtype=np.int64) for _ in range(count)]


def _group_batches(
    groups: Sequence[KVGroup], places: Sequence[Tensor], plans: Sequence[AttentionPlan | None]
) -> list[LayerBatch]:
    """The groups' parts of a batch, on tensors of the shapes of `_group_arrays`; a group without an
    attention plan has a recurrent state.
    """
    left = iter(places)
    parts: list[LayerBatch] = []
    for group, plan in zip(groups, plans, strict=True):
        if plan is None:
            parts.append(StateBatch(next(left), next(left)))
        else:
            keeps = group.kind != "none"
            parts.append(GroupBatch(next(left), plan) if keeps else PromptBatch(plan))
    return parts


def _state_places(counts: Array, drafts: Array, num_tokens: int) -> Array:
    """Places further in its row's ring at which the state after each of the step's tokens is kept:
    1 for the last before the drafts, then 2, 3, ...; 0 where it is not, as for padding.
    """
    places = np.zeros(num_tokens, dtype=np.int64)
    kept = np.cumsum(counts) - 1 - drafts
    places[np.repeat(kept, drafts + 1) + _ranges(drafts + 1)] = _ranges(drafts + 1) + 1
    return places


def _ranges(counts: Array) -> Array:
    """0 .. n-1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)


def _empty_plan(ops: Ops, pool: KVPool, group: KVGroup, device: Device) -> AttentionPlan:
    """A plan for no rows, which each step refills."""
    if group.kind == "none":
        none = np.zeros(0, dtype=np.int32)
        return ops.plan_prompts(query_start=np.zeros(1, np.int32), seq_lens=none)
    make = ops.plan_indexed if group.is_indexed else ops.plan_latent
    if not group.has_latents:
        window = None if group.chunk else group.window
        make = partial(ops.plan_attention, window=window, kv_heads=_fewest_heads(pool, group))
    plan: AttentionPlan = make(
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=np.zeros(0, dtype=np.int32),
        block_table=torch.zeros((0, 1), dtype=torch.int32, device=device.torch),
        block_size=group.block_size,
    )
    return plan


def _fewest_heads(pool: KVPool, group: KVGroup) -> int | None:
    memories = [pool.memories[layer] for layer in group.layers]
    return min((m.kv_heads for m in memories if isinstance(m, KeyValues)), default=None)
