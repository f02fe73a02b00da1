"""A model without tensors whose every token depends on every KV slot that it reads, so that a
wrong block is a wrong text.

The K/V of a token is a hash chained over the K/V before it, read through the block table; the next
token is a hash of all slots that a query at the last position sees. `oracle` computes the same
from a plain list of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from quire.scheduling.step import NewRow, StepPlan, StepResult

EOS = 0


def _slot_value(previous: int, token: int, position: int) -> int:
    return hash((previous, token, position))


def _next_token(seen: Sequence[Sequence[int]], seed: int, vocab_size: int) -> int:
    return hash((*map(tuple, seen), seed)) % vocab_size


def oracle(
    prompt: Sequence[int],
    *,
    seed: int,
    num_tokens: int,
    windows: Sequence[int | None],
    vocab_size: int,
) -> list[int]:
    """The output that follows `prompt`, up to `num_tokens` ids, the first EOS included."""
    tokens, slots = list(prompt), list[int]()
    output: list[int] = []
    while len(output) < num_tokens:
        for position in range(len(slots), len(tokens)):
            slots.append(_slot_value(slots[-1] if slots else 0, tokens[position], position))
        seen = [slots if w is None else slots[max(0, len(slots) - w) :] for w in windows]
        output.append(_next_token(seen, seed, vocab_size))
        tokens.append(output[-1])
        if output[-1] == EOS:
            break
    return output


class _Row:
    """A row's state as a runner keeps it: its tokens, how many have K/V, its block tables."""

    def __init__(self, new: NewRow) -> None:
        self.tokens = list(new.token_ids)
        self.num_computed = new.num_computed_tokens
        self.tables = [list(table) for table in new.block_ids]
        self.seed = new.seed


class HashRunner:
    """Executes step plans on the hash model, trusting nothing but the plan.

    Slots that were never written hold a value that no right text contains. Raises AssertionError
    when a plan contradicts the state that earlier plans built.
    """

    UNWRITTEN = -0x5EED

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        vocab_size: int = 50,
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.vocab_size = vocab_size
        # All groups share the pool: a block id belongs to one group at a time.
        self._slots = [[self.UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}
        self._step_id = -1

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Sampled ids stay in the rows too, as on a device, so a later plan needs no
        ids. The changes of a step that is run in parts are made with its first part.
        """
        if plan.step_id != self._step_id:
            self._step_id = plan.step_id
            self._change(plan)
        # All K/V of a step is written before any of it is read, as in a batched attention.
        for row in plan.decode_rows:
            self._write(self._rows[row], 1)
        for chunk in plan.chunks:
            self._write(self._rows[chunk.row], chunk.num_tokens)
        ids = [self._sample(self._rows[row]) for row in plan.sampled_rows]
        return StepResult(plan.step_id, ids)

    def _change(self, plan: StepPlan) -> None:
        for row in plan.removed:
            self._rows.pop(row, None)
        for new in plan.added:
            assert new.row not in self._rows, f"row {new.row} is taken"
            self._rows[new.row] = _Row(new)
        for grown in plan.new_blocks:
            table = self._rows[grown.row].tables[grown.group]
            assert len(table) == grown.first, "blocks go to a table's end"
            table += grown.block_ids
        for source, target in plan.copies:
            self._slots[target] = list(self._slots[source])

    def _write(self, row: _Row, count: int) -> None:
        size = self.block_size
        for position in range(row.num_computed, row.num_computed + count):
            for table, window in zip(row.tables, self.windows, strict=True):
                if position > 0 and window != 1:
                    previous = self._read(table, position - 1)
                else:
                    previous = self._chained(row, position)
                value = _slot_value(previous, row.tokens[position], position)
                self._slots[table[position // size]][position % size] = value
        row.num_computed += count

    def _read(self, table: list[int], position: int) -> int:
        return self._slots[table[position // self.block_size]][position % self.block_size]

    @staticmethod
    def _chained(row: _Row, position: int) -> int:
        """The value before `position` from the ids alone: a window of one token reads nothing
        before.
        """
        value = 0
        for index in range(position):
            value = _slot_value(value, row.tokens[index], index)
        return value

    def _sample(self, row: _Row) -> int:
        assert row.num_computed == len(row.tokens), "sampling before all tokens are computed"
        seen = []
        for table, window in zip(row.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, row.num_computed - window)
            block = first // self.block_size
            slots = list(chain.from_iterable(self._slots[b] for b in table[block:]))
            start = first - block * self.block_size
            seen.append(slots[start : start + row.num_computed - first])
        row.tokens.append(_next_token(seen, row.seed, self.vocab_size))
        return row.tokens[-1]
