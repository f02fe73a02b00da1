"""From a plan and the rows to the tensors of a step.

The tensors live as long as the runner: a step fills their first entries, so that a recorded program
can read them where they are, and a steady decode makes nothing anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.ops import AttentionPlan, Batch, GroupBatch, LayerKV, Ops
from quire.runner.device import CpuDevice
from quire.runner.rows import Rows
from quire.scheduling.step import StepPlan


@dataclass(slots=True)
class StepInputs:
    """A step's tensors for the model, and on the host what the rest of the step asks.

    `rows` [R] and `counts` [R]: the scheduled rows in order and their tokens; `starts` [R+1]: where
    each row's tokens begin among the T. `sampled` [M]: the rows that get a token, `last` [M]: where
    the hidden states stand from which it is drawn, None where that is 0 .. T-1. The batch's tensors
    are valid until the next step is built, the others as long as they are held.
    """

    batch: Batch
    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    sampled: np.ndarray
    last: np.ndarray | None


@dataclass(slots=True)
class _Layout:
    """Which rows compute how many tokens: what steps of a steady decode have in common.

    Of each token: `row_of_token` and `offsets`, how many tokens of this step its row has before it
    (None: there are none). Attention reads `query_start`, `seq_lens` and `table_rows`, the rows'
    places in the block tables.
    """

    inputs: StepInputs
    row_of_token: np.ndarray
    offsets: np.ndarray | None
    query_start: np.ndarray
    seq_lens: np.ndarray
    table_rows: np.ndarray


class BatchBuilder:
    """Builds `StepInputs`; `windows` and `kv` say what the KV groups and the layers have."""

    def __init__(
        self,
        *,
        rows: Rows,
        ops: Ops,
        device: CpuDevice,
        windows: Sequence[int | None],
        kv: list[LayerKV],
        capacity: int,
    ) -> None:
        """capacity: the most tokens of a step."""
        self._rows = rows
        self._device = device
        self._kv = kv
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._slots = [np.zeros(capacity, dtype=np.int64) for _ in windows]
        self._seq_lens = np.zeros(len(rows.num_tokens), dtype=np.int32)
        self.capacity_batch = Batch(
            ids=torch.zeros(capacity, dtype=torch.int64, device=device.torch),
            embeds=None,
            positions=device.tensor(self._positions)[None],
            groups=[
                GroupBatch(device.tensor(slots), _empty_plan(ops, rows.block_size, window))
                for slots, window in zip(self._slots, windows, strict=True)
            ],
            kv=kv,
            num_tokens=capacity,
        )
        """The whole tensors, of which a step has the first entries; plans that are changed in place
        are the steps' own."""
        # A steady decode comes with the same list object every step.
        self._decode_list: Sequence[int] | None = None
        self._layout: _Layout | None = None

    def build(self, plan: StepPlan) -> StepInputs:
        """The tensors of the plan's tokens; the rows have been brought up to date."""
        layout = self._layout
        if layout is None or plan.chunks or plan.decode_rows is not self._decode_list:
            layout = self._layout = self._lay_out(plan)
            self._decode_list = None if plan.chunks else plan.decode_rows
        self._fill(layout)
        return layout.inputs

    def _lay_out(self, plan: StepPlan) -> _Layout:
        decode = np.asarray(plan.decode_rows, dtype=np.int64)
        if not plan.chunks:
            starts = np.arange(len(decode) + 1)
            counts = np.ones(len(decode), dtype=np.int64)
            return self._layout_of(decode, counts, starts, decode, None)
        chunks = plan.chunks
        rows = np.concatenate([decode, [chunk.row for chunk in chunks]]).astype(np.int64)
        counts = np.ones(len(rows), dtype=np.int64)
        counts[len(decode) :] = [chunk.num_tokens for chunk in chunks]
        starts = np.concatenate([[0], np.cumsum(counts)])
        samples = np.ones(len(rows), dtype=bool)
        samples[len(decode) :] = [chunk.samples for chunk in chunks]
        return self._layout_of(rows, counts, starts, rows[samples], starts[1:][samples] - 1)

    def _layout_of(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        sampled: np.ndarray,
        last: np.ndarray | None,
    ) -> _Layout:
        num_tokens = int(starts[-1])
        row_of_token, offsets = rows, None
        if last is not None:
            row_of_token = np.repeat(rows, counts)
            offsets = np.arange(num_tokens) - np.repeat(starts[:-1], counts)
        inputs = StepInputs(self._batch(num_tokens), rows, counts, starts, sampled, last)
        return _Layout(
            inputs,
            row_of_token,
            offsets,
            query_start=starts.astype(np.int32),
            seq_lens=self._seq_lens[: len(rows)],
            table_rows=rows.astype(np.int32),
        )

    def _batch(self, num_tokens: int) -> Batch:
        whole = self.capacity_batch
        assert whole.ids is not None
        return Batch(
            ids=whole.ids[:num_tokens],
            embeds=None,
            positions=whole.positions[:, :num_tokens],
            groups=[GroupBatch(group.slots[:num_tokens], group.plan) for group in whole.groups],
            kv=self._kv,
            num_tokens=num_tokens,
        )

    def _fill(self, layout: _Layout) -> None:
        """Write this step's ids, positions, slots and lengths."""
        rows, inputs = self._rows, layout.inputs
        computed = rows.num_computed
        positions = self._positions[: inputs.batch.num_tokens]
        positions[:] = computed[layout.row_of_token]
        if layout.offsets is not None:
            positions += layout.offsets
        # On the device, since the newest ids may be nowhere else yet.
        assert inputs.batch.ids is not None
        self._device.take(rows.token_ids, layout.row_of_token, positions, inputs.batch.ids)
        layout.seq_lens[:] = computed[inputs.rows] + inputs.counts
        self._fill_groups(layout, positions)

    def _fill_groups(self, layout: _Layout, positions: np.ndarray) -> None:
        size = self._rows.block_size
        places, within = np.divmod(positions, size)
        groups = layout.inputs.batch.groups
        for slots, table, group in zip(self._slots, self._rows.tables, groups, strict=True):
            into = slots[: len(positions)]
            np.multiply(table[layout.row_of_token, places], size, out=into, dtype=np.int64)
            into += within
            group.plan = group.plan.refill(
                layout.query_start, layout.seq_lens, table, layout.table_rows
            )


def _empty_plan(ops: Ops, block_size: int, window: int | None) -> AttentionPlan:
    """A plan for no rows, which each step refills."""
    plan: AttentionPlan = ops.plan_attention(
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=np.zeros(0, dtype=np.int32),
        block_table=torch.zeros((0, 1), dtype=torch.int32),
        block_size=block_size,
        window=window,
    )
    return plan
