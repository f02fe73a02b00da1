"""Attention plans of the native kernels: the rows of a step at addresses that stay."""

from __future__ import annotations

import operator

import numpy as np
import torch

PLAN_FIELDS = 6
"""Fields of 8 bytes of `AttentionStep` in csrc/kernels/kernels.hpp."""

IntArray = np.ndarray


class CpuPlan:
    """The rows of a step in memory that the kernels read when they run.

    A recorded program reads the plan that it was recorded with: `refill` that one before each
    replay.
    """

    def __init__(self, window: int | None, block_size: int) -> None:
        """A plan for no rows."""
        self.window = window
        self.block_size = block_size
        self.header = torch.zeros(PLAN_FIELDS, dtype=torch.int64)  # AttentionStep
        self._fields = self.header.numpy()
        none = np.zeros(0, dtype=np.int32)
        self._held: tuple[IntArray, ...] = ()
        self.refill(np.zeros(1, dtype=np.int32), none, np.zeros((0, 1), dtype=np.int32), none)

    def refill(
        self,
        query_start: IntArray,
        seq_lens: IntArray,
        block_table: IntArray,
        rows: IntArray,
        on_device: torch.Tensor | None = None,
    ) -> CpuPlan:
        """Describe another step: query_start [R+1], seq_lens [R], block_table [*, B], all int32.

        Row i of the step is row rows[i] of the table. Arrays are not copied: their contents must
        not change before the step is over, except the table's beyond the lengths. Gives this plan;
        for the arrays that it has already there is nothing to do.
        """
        arrays = (query_start, seq_lens, block_table, rows)
        if self._held and all(map(operator.is_, arrays, self._held)):
            return self
        assert len(query_start) == len(seq_lens) + 1 == len(rows) + 1
        for array in arrays:
            assert array.dtype == np.int32 and (array.size == 0 or array.strides[-1] == 4)
        self._held = arrays
        self._fields[:] = (
            len(seq_lens),
            query_start.ctypes.data,
            seq_lens.ctypes.data,
            block_table.ctypes.data,
            rows.ctypes.data,
            block_table.strides[0] // 4,
        )
        return self

    @property
    def lengths(self) -> tuple[IntArray, IntArray]:
        """See `AttentionPlan`."""
        query_start, seq_lens, _, _ = self._held
        return np.diff(query_start), seq_lens
