"""From plans and rows to tensors, against the definition of each, entry by entry."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from quire.models.kv_pool import plan_kv_pool
from quire.models.layer_memory import KeyValues, NumberBytes, RecurrentState
from quire.ops import NO_BLOCK, select
from quire.params import SamplingParams
from quire.runner.batch import BatchBuilder
from quire.runner.devices.device import CpuDevice
from quire.runner.rows import Rows
from quire.step.plan import Chunk, NewRow, StepPlan

NUM_ROWS, MAX_LEN, SIZE = 6, 40, 4
WINDOWS = (None, 3, 7)
POOL = plan_kv_pool(
    [
        *(KeyValues(2, 8), KeyValues(1, 8, window=3), KeyValues(2, 8, window=7)),
        RecurrentState(wide_numbers=16),
    ],
    SIZE,
    NumberBytes(4, 4),
)
SIZES = [None if group.kind == "state" else group.block_size for group in POOL.groups]
assert SIZES == [4, 8, 4, None]


class Bench:
    """Rows with random requests, and a builder over them."""

    def __init__(self, seed, ring_size=2):
        self.random = random.Random(seed)
        self.step_id = 0
        self.ring_size = ring_size
        device = CpuDevice()
        self.rows = Rows(
            num_rows=NUM_ROWS,
            max_len=MAX_LEN,
            block_sizes=SIZES,
            device=device,
            ring_size=ring_size,
        )
        self.ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
        self.builder = BatchBuilder(
            rows=self.rows, ops=self.ops, device=device, pool=POOL, kv=[], capacity=64
        )
        self.decode = list(range(NUM_ROWS))
        self.apply(added=[self.request(row) for row in range(NUM_ROWS)])

    def request(self, row):
        length = self.random.randint(12, 20)
        lengths = (MAX_LEN // size if size else self.ring_size for size in SIZES)
        tables = tuple(self.random.sample(range(100), length) for length in lengths)
        return NewRow(
            row=row,
            handle=row,
            token_ids=[self.random.randrange(1000) for _ in range(length)],
            num_prompt_tokens=length,
            num_computed_tokens=length - 1,
            block_ids=tables,
            params=SamplingParams(),
            seed=0,
        )

    def plan(self, decode_rows, chunks=(), added=(), removed=()):
        self.step_id += 1
        return StepPlan(self.step_id, list(removed), list(added), [], decode_rows, list(chunks))

    def apply(self, **changes):
        self.rows.apply(self.plan([], **changes))

    def build(self, decode_rows, chunks=()):
        inputs = self.builder.build(self.plan(decode_rows, chunks))
        self.builder.gather(inputs)
        return inputs

    def advance(self, inputs, token_ids):
        self.rows.write(inputs.sampled_rows, inputs.sampled_at, torch.tensor(token_ids))
        self.rows.advance(inputs.rows, inputs.counts, inputs.sampled)

    def check(self, inputs, counts):
        """Everything in `inputs` for these rows (row -> tokens, in order), one token at a time."""
        rows, at = self.rows, 0
        for row, count in counts.items():
            for i in range(count):
                position = int(rows.num_computed[row]) + i
                assert inputs.batch.ids[at] == rows.token_ids[row, position]
                assert inputs.batch.positions[0, at] == position
                *groups, states = inputs.batch.groups
                for group, table, size in zip(groups, rows.tables, SIZES, strict=False):
                    slot = int(table[row, position // size]) * size + position % size
                    assert group.slots[at] == slot
                assert states.reads[at] == (NO_BLOCK if i else self.state(row, 0))
                is_last = i == count - 1
                assert states.writes[at] == (self.state(row, 1) if is_last else NO_BLOCK)
                at += 1
        assert len(inputs.batch.ids) == inputs.batch.num_tokens == at
        ends = [int(rows.num_computed[row]) + count for row, count in counts.items()]
        for group, window in zip(inputs.batch.groups, WINDOWS, strict=False):
            assert group.plan.window == window
            assert group.plan.seq_lens.tolist() == ends

    def state(self, row, further):
        """The block of a place of the row's ring."""
        place = int(self.rows.state_index[row]) + further
        return int(self.rows.tables[3][row, place % self.ring_size])


@pytest.mark.parametrize("seed", range(8))
def test_every_entry_is_what_rows_and_plan_say(seed):
    bench = Bench(seed)
    for _ in range(12):
        decode = bench.random.sample(range(NUM_ROWS), bench.random.randint(0, NUM_ROWS))
        others = [row for row in range(NUM_ROWS) if row not in decode][: bench.random.randint(0, 2)]
        chunks = [
            Chunk(row, bench.random.randint(1, 3), bench.random.random() < 0.5) for row in others
        ]
        if not decode and not chunks:
            continue
        for _ in range(bench.random.randint(1, 2)):  # the same list again is a steady decode
            inputs = bench.build(decode, chunks)
            counts = dict.fromkeys(decode, 1) | {c.row: c.num_tokens for c in chunks}
            bench.check(inputs, counts)
            sampling = [*decode, *(c.row for c in chunks if c.samples)]
            assert inputs.sampled.tolist() == sampling
            last = range(len(decode)) if inputs.last is None else inputs.last.tolist()
            ends = dict(zip(counts, inputs.starts[1:].tolist(), strict=True))
            assert list(last) == [ends[row] - 1 for row in sampling]
        if not chunks:
            bench.advance(inputs, [bench.random.randrange(1000) for _ in sampling])


def test_a_steady_decode_makes_nothing_anew_and_still_moves_on():
    bench = Bench(1)
    first = bench.build(bench.decode)
    batch, positions = first.batch, first.batch.positions.clone()
    bench.advance(first, [7, 8, 9, 10, 11, 12])
    second = bench.build(bench.decode)
    assert second is first and second.batch is batch
    assert torch.equal(batch.positions, positions + 1)
    assert batch.ids.tolist() == [7, 8, 9, 10, 11, 12]
    bench.check(second, dict.fromkeys(bench.decode, 1))
    bench.advance(second, [5, 4, 3, 2, 1, 0])
    third = bench.build(list(bench.decode))
    assert third is first, "a rank gets a list of its own with each plan"
    bench.check(third, dict.fromkeys(bench.decode, 1))


def test_a_row_that_another_request_takes_is_read_afresh():
    bench = Bench(2)
    bench.build(bench.decode)
    bench.apply(removed=[3], added=[bench.request(3)])
    bench.check(bench.build(bench.decode), dict.fromkeys(bench.decode, 1))


def test_equal_lists_that_are_not_the_same_may_differ_later():
    bench = Bench(3)
    rows = [0, 1, 2]
    bench.check(bench.build(rows), dict.fromkeys(rows, 1))
    half = [2, 1]  # as the fault boundary cuts a step
    bench.check(bench.build(half), dict.fromkeys(half, 1))
    bench.check(bench.build(rows), dict.fromkeys(rows, 1))


def test_a_state_is_kept_before_the_first_draft_and_after_each():
    bench = Bench(2, ring_size=4)
    chunks = [Chunk(0, 3, samples=True, num_drafts=2), Chunk(1, 2, samples=False)]
    states = bench.build([], chunks).batch.groups[3]
    assert states.reads.tolist() == [
        bench.state(0, 0),
        *[NO_BLOCK] * 2,
        bench.state(1, 0),
        NO_BLOCK,
    ]
    kept = [bench.state(0, further) for further in (1, 2, 3)]
    assert states.writes.tolist() == [*kept, NO_BLOCK, bench.state(1, 1)]


def test_a_state_goes_on_after_the_last_draft_that_was_right():
    bench = Bench(2, ring_size=5)
    rows = bench.rows
    inputs = bench.build([], [Chunk(0, 4, samples=True, num_drafts=3), Chunk(1, 2, samples=False)])
    before = rows.state_index[:2].tolist()
    sampled, gained = inputs.sampled[:1], 3  # two drafts are right
    rows.advance(inputs.rows, inputs.counts, sampled, gained)
    assert (rows.state_index[:2] - before).tolist() == [3, 1]


def test_positions_on_three_axes_come_with_the_prompt_and_go_on_with_an_offset():
    bench = Bench(4)
    builder = BatchBuilder(
        rows=bench.rows,
        ops=bench.ops,
        device=CpuDevice(),
        pool=POOL,
        kv=[],
        capacity=64,
        axes=3,
    )
    given = np.stack([np.arange(9), np.arange(9) + 20, np.arange(9) + 40]).astype(np.int32)
    new = msgspec.structs.replace(
        bench.request(0),
        token_ids=list(range(12)),
        num_prompt_tokens=9,
        num_computed_tokens=4,
        positions=given,
        position_offset=-3,
    )
    bench.apply(removed=[0], added=[new])
    plan = bench.plan([1], [Chunk(0, 7, samples=False), Chunk(2, 1, samples=True)])
    batch = builder.build(plan).batch
    places = [int(bench.rows.num_computed[row]) for row in (1, 2)]
    for axis in range(3):
        offset = 20 * axis
        prompt = [offset + place for place in (4, 5, 6, 7, 8)]
        assert batch.positions[axis].tolist() == [places[0], *prompt, 6, 7, places[1]]
    assert batch.positions.shape == (3, 9)
    assert builder.capacity_batch.positions.shape == (3, 64)
    bench.apply(removed=[0], added=[bench.request(0)])
    again = builder.build(bench.plan([0, 1])).batch
    assert again.positions[2].tolist() == bench.rows.num_computed[:2].tolist()
