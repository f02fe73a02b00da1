"""Attention plans of the Triton kernels: which tiles of queries there are, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.ops.step_rows import StepRows

PREFILL_TOKENS = 64
"""Queries of one row that a program serves at once, if a KV head has one query head."""


LEAST_SHARE = 128
"""Keys below which dividing a row's between programs costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Programs of one launch, each for up to `num_queries` tokens: `rows` [n] int32, the row of the
    step of each.

    `starts` int32: [n], the first of the row's new tokens; where programs share the keys of a row
    (`shares_keys`), [R+1]: those of row r are starts[r] up to starts[r + 1], and from starts[R] on
    programs have nothing to do. `shape`: how many lines a program's product has at least and at
    best, a line being a token's query of one head. `varies`: whether a token's bits may depend on
    what else is in its tile. `is_crowded`: most programs have a row's keys to themselves.
    """

    rows: Tensor
    starts: Tensor
    num_queries: int
    shares_keys: bool
    shape: tuple[int, int]
    varies: bool
    is_crowded: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """The settings of a plan. `spare`: for each KV head, programs in addition to one for every row
    with one new token; they share the keys of the longest rows with those; 0: a token's bits must
    not depend on the other rows. `upload`: a host array -> its values on the device; `shape`: as of
    `Tiles`.
    """

    spare: int
    upload: Callable[[np.ndarray], Tensor]
    shape: tuple[int, int]

    def tiles(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        num_queries: int,
        *,
        shares_keys: bool = False,
        is_crowded: bool = False,
    ) -> Tiles:
        """Tiles of these, on the device."""
        return Tiles(
            self.upload(rows.astype(np.int32)),
            self.upload(starts.astype(np.int32)),
            num_queries,
            shares_keys,
            self.shape,
            varies=self.spare > 0,
            is_crowded=is_crowded,
        )


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's rows for one KV group: row i is row table_rows[i] of the table. `host` are
    query_start and seq_lens as they were given. `whole`: that of `SpanPlan.refill_spans`; None:
    there are no spans.
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
    whole: Tensor | None = None

    def refill(self, step: StepRows) -> TritonPlan:
        """A plan for another step; see `quire.ops.attention.AttentionPlan`."""
        table, rows = step.on_device, step.rows
        if table is None:
            table, rows = self._own_table(step)
        return self._of(step, table, rows, None)

    def refill_spans(self, step: StepRows, whole: np.ndarray) -> TritonPlan:
        """The same with spans; see `quire.ops.attention.SpanPlan`."""
        return self._of(step, *self._own_table(step), whole)

    def _own_table(self, step: StepRows) -> tuple[Tensor, np.ndarray]:
        # only blocks that these rows have: the host's table has room for the longest sequence
        width = -(-int(step.seq_lens.max(initial=0)) // self.block_size)
        table = np.ascontiguousarray(step.block_table[step.rows, :width])
        return self.means.upload(table), np.arange(len(table), dtype=np.int32)

    def _of(
        self, step: StepRows, table: Tensor, rows: np.ndarray, whole: np.ndarray | None
    ) -> TritonPlan:
        return plan_rows(
            *(step.query_start, step.seq_lens, table, self.block_size, self.window, rows),
            means=self.means,
            whole=whole,
        )

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `AttentionPlan`."""
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
    whole: np.ndarray | None = None,
) -> TritonPlan:
    """See `quire.ops.attention.plan_attention`; table_rows [R] int32: the step's rows among those
    of the table, None where they are the same; whole [R]: see `TritonPlan`.
    """
    upload = means.upload
    num_new = np.diff(query_start)
    if table_rows is None:
        table_rows = np.arange(block_table.shape[0], dtype=np.int32)
    assert len(num_new) == len(seq_lens) == len(table_rows)
    assert (num_new <= seq_lens).all(), "a row has more new tokens than tokens"
    launches = []
    is_decode = num_new == 1
    if whole is not None:
        is_decode &= whole == 0
    decode = is_decode.nonzero()[0]
    if len(decode):
        seen = seq_lens if window is None else np.minimum(seq_lens, window)
        launches.append(_decodes(decode, seen, means))
    longer = ((num_new > 0) & ~is_decode).nonzero()[0]
    if len(longer):
        launches.append(tiles_of_prompts(longer, num_new, means))
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
        None if whole is None else upload(whole.astype(np.int32)),
    )


def tiles_of_prompts(rows: np.ndarray, num_new: np.ndarray, means: Means) -> Tiles:
    """Programs for the new tokens of `rows` [n >= 1], of which row r has num_new[r]."""
    counts = -(-num_new[rows] // PREFILL_TOKENS)
    ends = np.cumsum(counts)
    starts = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return means.tiles(np.repeat(rows, counts), starts * PREFILL_TOKENS, PREFILL_TOKENS)


def _decodes(decode: np.ndarray, seen: np.ndarray, means: Means) -> Tiles:
    """Programs for the rows `decode` of a step, which see `seen` keys.

    As many as there are rows, and the spare ones, whatever the lengths, so that a captured graph
    serves any. Where no program has more keys than the sum of all over the spare ones, they are
    enough: rounding up costs each row one more at most, and that is its own.
    """
    if not means.spare:
        return means.tiles(decode, np.zeros(len(decode)), 1)
    keys = seen[decode]
    counts = -(-keys // max(LEAST_SHARE, -(-int(keys.sum()) // means.spare)))
    rows = np.full(len(decode) + means.spare, decode[0])
    shared = np.repeat(decode, counts)
    rows[: len(shared)] = shared
    starts = np.zeros(len(seen) + 1, dtype=np.int32)
    starts[decode + 1] = counts
    return means.tiles(
        rows, starts.cumsum(), 1, shares_keys=True, is_crowded=len(decode) >= means.spare
    )
