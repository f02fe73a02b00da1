"""Attention plans of the Triton kernels: which tiles of queries there are, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.ops.plan import CountedPlan

PREFILL_TOKENS = 64
"""Queries of one row that a program serves at once, if a KV head has one query head."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Programs of one launch: `rows` and `starts` [n] int32, the row of the step and the first of
    its new tokens. Each serves up to `num_queries` tokens; `num_splits` programs share its keys.
    `shape`: how many lines a program's product has at least and at best, a line being a token's
    query of one head.
    """

    rows: Tensor
    starts: Tensor
    num_queries: int
    num_splits: int
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Means:
    """What a plan is made with. `split`: rows with one new token -> programs that share the keys of
    each; `upload`: a host array -> its values on the device; `shape`: that of `Tiles`.
    """

    split: Callable[[int], int]
    upload: Callable[[np.ndarray], Tensor]
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TritonPlan(CountedPlan):
    """One step's rows for one KV group: row i is row table_rows[i] of the table. `host` are
    query_start and seq_lens as they were given.
    """

    window: int | None
    block_size: int
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    table_rows: Tensor
    launches: tuple[Tiles, ...]
    host: tuple[np.ndarray, np.ndarray]
    means: Means

    def refill(
        self,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        rows: np.ndarray,
        on_device: Tensor | None = None,
    ) -> TritonPlan:
        """A plan for another step; see `quire.ops.attention.AttentionPlan`."""
        if on_device is None:
            width = -(-int(seq_lens.max(initial=0)) // self.block_size)
            on_device = self.means.upload(np.ascontiguousarray(block_table[rows, :width]))
            rows = np.arange(len(rows), dtype=np.int32)
        return plan_rows(
            query_start, seq_lens, on_device, self.block_size, self.window, rows, means=self.means
        )

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `CountedPlan`."""
        query_start, seq_lens = self.host
        return np.diff(query_start), seq_lens


def plan_rows(
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    block_table: Tensor,
    block_size: int,
    window: int | None,
    table_rows: np.ndarray | None = None,
    *,
    means: Means,
) -> TritonPlan:
    """See `quire.ops.attention.plan_attention`; table_rows [R] int32: the step's rows among those
    of the table, None where they are the same.
    """
    split, upload = means.split, means.upload
    num_new = np.diff(query_start)
    if table_rows is None:
        table_rows = np.arange(block_table.shape[0], dtype=np.int32)
    assert len(num_new) == len(seq_lens) == len(table_rows)
    assert (num_new <= seq_lens).all(), "a row has more new tokens than tokens"
    launches = []
    decode = (num_new == 1).nonzero()[0]
    if len(decode):
        starts = np.zeros(len(decode), dtype=np.int32)
        launches.append(
            Tiles(
                upload(decode.astype(np.int32)), upload(starts), 1, split(len(decode)), means.shape
            )
        )
    longer = (num_new > 1).nonzero()[0]
    if len(longer):
        counts = -(-num_new[longer] // PREFILL_TOKENS)
        rows = np.repeat(longer, counts).astype(np.int32)
        ends = np.cumsum(counts)
        starts = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        starts = (starts * PREFILL_TOKENS).astype(np.int32)
        launches.append(Tiles(upload(rows), upload(starts), PREFILL_TOKENS, 1, means.shape))
    return TritonPlan(
        window,
        block_size,
        upload(query_start.astype(np.int32)),
        upload(seq_lens.astype(np.int32)),
        block_table.to(torch.int32).contiguous(),
        upload(table_rows),
        tuple(launches),
        (query_start.copy(), seq_lens.copy()),
        means,
    )
