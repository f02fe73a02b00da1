"""From a plan and the rows to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.ops import Batch, GroupBatch, LayerKV, Ops
from quire.runner.device import CpuDevice
from quire.runner.rows import Rows
from quire.scheduling.step import StepPlan


@dataclass(slots=True)
class StepInputs:
    """A step's tensors for the model, and on the host what the rest of the step asks.

    `rows` [R] and `counts` [R]: the scheduled rows in order and their tokens; `starts` [R+1]: where
    each row's tokens begin among the T. `sampled` [M]: the rows that get a token, `last` [M]: where
    the hidden states stand from which it is drawn.
    """

    batch: Batch
    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    sampled: np.ndarray
    last: np.ndarray


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
    ) -> None:
        self._rows = rows
        self._ops = ops
        self._device = device
        self._windows = windows
        self._kv = kv
        # A steady decode comes with the same list object every step.
        self._decode_list: Sequence[int] = ()
        self._decode_rows = np.zeros(0, dtype=np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """The tensors of the plan's tokens; the rows have been brought up to date."""
        decode = self._decode(plan.decode_rows)
        if not plan.chunks:
            rows, counts = decode, np.ones(len(decode), dtype=np.int64)
            sampled, last = decode, np.arange(len(decode))
            starts = np.arange(len(decode) + 1)
            row_of_token, positions = rows, self._rows.num_computed[rows]
        else:
            chunks = plan.chunks
            rows = np.concatenate([decode, [chunk.row for chunk in chunks]]).astype(np.int64)
            counts = np.ones(len(rows), dtype=np.int64)
            counts[len(decode) :] = [chunk.num_tokens for chunk in chunks]
            starts = np.concatenate([[0], np.cumsum(counts)])
            samples = np.ones(len(rows), dtype=bool)
            samples[len(decode) :] = [chunk.samples for chunk in chunks]
            sampled, last = rows[samples], starts[1:][samples] - 1
            row_of_token = np.repeat(rows, counts)
            first = np.repeat(self._rows.num_computed[rows] - starts[:-1], counts)
            positions = first + np.arange(starts[-1])
        batch = self._batch(rows, counts, starts, row_of_token, positions)
        return StepInputs(batch, rows, counts, starts, sampled, last)

    def _decode(self, decode_rows: Sequence[int]) -> np.ndarray:
        if decode_rows is not self._decode_list:
            self._decode_rows = np.asarray(decode_rows, dtype=np.int64)
            self._decode_list = decode_rows
        return self._decode_rows

    def _batch(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        row_of_token: np.ndarray,
        positions: np.ndarray,
    ) -> Batch:
        tensor = self._device.tensor
        seq_lens = self._rows.num_computed[rows] + counts
        groups = [
            self._group(g, rows, starts, seq_lens, row_of_token, positions)
            for g in range(len(self._windows))
        ]
        return Batch(
            ids=self._ids(row_of_token, positions),
            embeds=None,
            positions=tensor(positions)[None],
            groups=groups,
            kv=self._kv,
            num_tokens=len(positions),
        )

    def _ids(self, row_of_token: np.ndarray, positions: np.ndarray) -> Tensor:
        """Gathered on the device, since the newest ids may be nowhere else yet."""
        return self._rows.token_ids[row_of_token, positions].long()

    def _group(
        self,
        group: int,
        rows: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        row_of_token: np.ndarray,
        positions: np.ndarray,
    ) -> GroupBatch:
        size, table = self._rows.block_size, self._rows.tables[group]
        blocks = table[row_of_token, positions // size].astype(np.int64)
        slots = blocks * size + positions % size
        width = -(-int(seq_lens.max()) // size)
        plan = self._ops.plan_attention(
            query_start=starts.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_table=self._device.tensor(table[rows, :width]),
            block_size=size,
            window=self._windows[group],
        )
        return GroupBatch(self._device.tensor(slots), plan)
