"""The runner's state of each running request: its ids, its lengths, its block tables.

A request keeps its row from admission to the end, so a step changes little: it appends one id and
now and then a block. Features that need more state per row (the sampler, prompt logprobs) are parts
that are updated with every row that is added or removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from quire.ops.formats.lora import NO_ADAPTER
from quire.ops.mixers.spans import Span
from quire.runner.devices.device import Device
from quire.step.faults import RowFailures
from quire.step.plan import NewBlocks, NewRow, StepPlan
from quire.step.result import NewTokens

logger = logging.getLogger(__name__)


class RowPart(Protocol):
    """State of a feature that lives as long as a request has its row."""

    def add_row(self, row: NewRow) -> None:
        """Add a new or resumed request in `row.row`. If this raises, nothing is kept."""
        ...

    def remove_row(self, row: int) -> None:
        """The request leaves the row."""
        ...


class Rows:
    """State of up to `num_rows` requests.

    - `token_ids` [num_rows + 1, max_len] int32 on the device: prompt and output, sampled ids
      included before the host has seen them, then drafts of the next ones.
    - `num_tokens`, `num_computed`, `num_prompt` [num_rows + 1] int64 on the host.
    - `tables[g]` [num_rows + 1, B] int32 on the host: the block table of KV group g, with blocks
      of `block_sizes[g]` tokens; `device_tables[g]` is the same on the device. Where the block
      size is None, the ring of the row's recurrent states (`NewRow.block_ids`), whose present
      state is entry `state_index` of the row, modulo the ring's length.

    - `adapter_slots` [num_rows + 1] int32 on the host: as `quire.ops.formats.lora` has them.
    - `position_offsets` [num_rows + 1] int64 on the host, and `prompt_positions` [P, n] by row, of
      those that have some: as in `NewRow`.
    - `spans`: by row, the positions [start, stop) that see each other in both directions.

    The last row, `pad_row`, belongs to no request: it has no tokens, and no block but NULL_BLOCK.
    Padding reads it.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_len: int,
        block_sizes: Sequence[int | None],
        device: Device,
        parts: Sequence[RowPart] = (),
        ring_size: int = 2,
    ) -> None:
        self.block_sizes = list(block_sizes)
        self.ring_size = ring_size
        self.parts = list(parts)
        self.pad_row = num_rows
        self._device = device
        self.token_ids: Tensor = device.table(np.zeros((num_rows + 1, max_len), dtype=np.int32))
        self.num_tokens = np.zeros(num_rows + 1, dtype=np.int64)
        self.num_computed = np.zeros(num_rows + 1, dtype=np.int64)
        self.num_prompt = np.zeros(num_rows + 1, dtype=np.int64)
        self.state_index = np.zeros(num_rows + 1, dtype=np.int64)
        self.adapter_slots = np.full(num_rows + 1, NO_ADAPTER, dtype=np.int32)
        self.position_offsets = np.zeros(num_rows + 1, dtype=np.int64)
        self.prompt_positions: dict[int, np.ndarray[Any, Any]] = {}
        self.spans: dict[int, list[Span]] = {}
        self.handles = np.full(num_rows, -1, dtype=np.int64)
        self.tables = [
            np.zeros((num_rows + 1, ring_size if size is None else -(-max_len // size)), np.int32)
            for size in block_sizes
        ]
        self.device_tables = [device.table(table) for table in self.tables]
        self.highest_block = -1
        """The highest block that a row had so far."""
        self._num_blocks = np.zeros((len(block_sizes), num_rows + 1), dtype=np.int64)
        self._step_id = -1
        self._changed_at = np.full(num_rows, -1, dtype=np.int64)
        self._broken: dict[int, str] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes, so that the rows are where the plan's tokens start. When a step
        is run again, whole or in parts, this has no effect.

        A row whose changes fail is broken until its request leaves. Raises RowFailures when the
        plan computes tokens of broken rows, with all changes made.
        """
        # the fault boundary runs parts of a step again, and rows have changed by then
        if plan.step_id != self._step_id:
            self._step_id = plan.step_id
            self._change(plan)
        if self._broken:
            planned = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
            errors = {row: self._broken[row] for row in planned if row in self._broken}
            if errors:
                raise RowFailures(errors)

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write the newest ids [R] int64 of rows [R] at their `num_tokens`; all on the device. They
        count after `advance`.
        """
        self._device.put(self.token_ids, rows, positions, token_ids)

    def advance(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        sampled: np.ndarray,
        gained: np.ndarray | int = 1,
    ) -> None:
        """Complete a step: `rows` have K/V of `counts` more tokens, `sampled` have `gained` more
        tokens. The recurrent state moves on by one place of its ring, or to that after the last
        right draft.
        """
        self.num_tokens[sampled] += gained
        self.num_computed[rows] += counts
        self.state_index[rows] += 1
        self.state_index[sampled] += gained - 1

    def retreat(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Undo `advance` of rows that have not sampled: the step has failed elsewhere."""
        self.num_computed[rows] -= counts
        self.state_index[rows] -= 1

    def advance_verified(
        self, rows: np.ndarray, counts: np.ndarray, sampled: np.ndarray, drafts: np.ndarray,
        accepted: np.ndarray,
    ) -> None:  # fmt: skip
        """Complete a step in which the `sampled` rows verified so many `drafts` [R] and got so many
        `accepted` [R] tokens: the K/V of wrong drafts do not count.
        """
        self.advance(rows, counts, sampled, accepted)
        # the K/V of wrong drafts lies after this and is written over
        self.num_computed[sampled] -= drafts + 1 - accepted

    def follow(
        self, sampled: np.ndarray, counts: np.ndarray, drafts: np.ndarray, new: NewTokens
    ) -> None:
        """Complete `sampled` rows [R] of a step, in which they computed `counts` [R] tokens and
        verified `drafts` [R], with the tokens that another worker drew. A row that was given back
        or to another request after this step is left as it is.
        """
        token_ids, draft_ids = iter(new.token_ids), iter(new.draft_ids)
        accepted = np.array(new.counts, dtype=np.int64)
        for row, count, ready in zip(sampled.tolist(), new.counts, new.num_drafts, strict=True):
            ids = [*islice(token_ids, count), *islice(draft_ids, ready)]
            # the row may have another request by the time the tokens come
            if self._changed_at[row] <= new.step_id:
                self.write_drafts(row, ids)
        kept = self._changed_at[sampled] <= new.step_id
        rows = sampled[kept]
        self.advance_verified(rows, counts[kept], rows, drafts[kept], accepted[kept])

    def capacity(self, rows: np.ndarray) -> np.ndarray:
        """Number of tokens that the blocks of these rows [n] hold."""
        sizes = [size for size in self.block_sizes if size is not None]
        counts = [
            self._num_blocks[group, rows]
            for group, size in enumerate(self.block_sizes)
            if size is not None
        ]
        held = [count * size for count, size in zip(counts, sizes, strict=True)]
        return np.minimum.reduce(held, initial=self.token_ids.shape[1])

    def write_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Write guesses of the row's next tokens, or what these are, after its known tokens."""
        self._device.write(self.token_ids, row, int(self.num_tokens[row]), token_ids)

    def drafts(self, row: int, count: int) -> list[int]:
        """Return the ids of the row's first `count` drafts, which a device has to be waited for."""
        first = int(self.num_tokens[row])
        return [int(token) for token in self.token_ids[row, first : first + count].tolist()]

    def _change(self, plan: StepPlan) -> None:
        # first: a row that one request leaves may be taken in the same plan
        for row in plan.removed:
            self._changed_at[row] = plan.step_id
            self._remove(row)
            self._broken.pop(row, None)  # the failure was the old request's
        for new in plan.added:
            self._try(new.row, self._add, new)
        for grown in plan.new_blocks:
            self._try(grown.row, self._append_blocks, grown)

    def _try(self, row: int, change: Callable[[Any], None], what: Any) -> None:
        try:
            change(what)
        except Exception:
            logger.exception("failed to update row %d", row)
            self._broken[row] = "the request could not be taken into the batch"

    def _add(self, new: NewRow) -> None:
        row = new.row
        assert self.handles[row] < 0, f"row {row} is taken"
        self._changed_at[row] = self._step_id
        self.handles[row] = new.handle
        self._device.write(self.token_ids, row, 0, new.token_ids)
        self.num_tokens[row] = len(new.token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.state_index[row] = 0
        self.adapter_slots[row] = new.adapter - 1
        self.position_offsets[row] = new.position_offset
        self.prompt_positions.pop(row, None)
        if new.positions is not None:
            self.prompt_positions[row] = new.positions
        self.spans.pop(row, None)
        # a set: several pieces of one picture name the same whole
        wholes = {Span(*s.whole, bool(s.prefix)) for s in new.embedded if s.whole is not None}
        if wholes:
            self.spans[row] = sorted(wholes)
        for group, blocks in enumerate(new.block_ids):
            self._write_blocks(group, row, 0, blocks)
        added: list[RowPart] = []
        try:
            for part in self.parts:
                part.add_row(new)
                added.append(part)
        except BaseException:
            self.handles[row] = -1
            for part in added:
                part.remove_row(row)
            raise

    def _remove(self, row: int) -> None:
        """Remove a row, even one that never reached the runner because its request left before."""
        if self.handles[row] >= 0:
            self.handles[row] = -1
            for part in self.parts:
                self._try(row, part.remove_row, row)

    def _append_blocks(self, grown: NewBlocks) -> None:
        self._write_blocks(grown.group, grown.row, grown.first, grown.block_ids)

    def _write_blocks(self, group: int, row: int, first: int, blocks: Sequence[int]) -> None:
        self.tables[group][row, first : first + len(blocks)] = blocks
        self._num_blocks[group, row] = first + len(blocks)
        self.highest_block = max(self.highest_block, max(blocks, default=-1))
        self._device.write(self.device_tables[group], row, first, blocks)
