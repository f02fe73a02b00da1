"""Graphs of decode sizes: which step replays which, and what a replay reads; on a back end that
records a function and runs it again on what is at its addresses.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.models.decoder import HiddenStates
from quire.models.kv_pool import plan_kv_pool
from quire.models.layer_memory import KeyValues, NumberBytes
from quire.ops import PAD_SLOT, select
from quire.params import SamplingParams
from quire.runner.batch import BatchBuilder
from quire.runner.devices.stream_device import StreamDevice
from quire.runner.forward.decode_graphs import GraphForward, decode_sizes
from quire.runner.rows import Rows
from quire.step.plan import Chunk, NewRow, StepPlan
from tests.support.late_driver import LateDriver
from tests.support.recorded_graphs import RecordingGraphs

NUM_ROWS, MAX_LEN, SIZE = 11, 40, 4
POOL = plan_kv_pool([KeyValues(1, 8), KeyValues(1, 8, window=7)], SIZE, NumberBytes(4, 4))


class Model:
    """Hidden states say what was read for each token: id, position, slots; auxiliary ones as
    well, twice and three times.
    """

    num_calls = 0

    def forward(self, batch):
        self.num_calls += 1
        columns = [batch.ids, batch.positions[0], *(group.slots for group in batch.groups)]
        states = torch.stack(columns, dim=1).float()
        return HiddenStates(states, (2 * states, 3 * states))

    def logits(self, hidden):
        return hidden * 2


class Bench:
    def __init__(self, seed, sizes):
        self.random = random.Random(seed)
        device = StreamDevice(LateDriver(seed), arena_bytes=1 << 14)
        self.rows = Rows(
            num_rows=NUM_ROWS, max_len=MAX_LEN, block_sizes=[SIZE, SIZE], device=device
        )
        ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
        self.builder = BatchBuilder(
            rows=self.rows, ops=ops, device=device, pool=POOL, kv=[], capacity=64,
            sizes=sizes,
        )  # fmt: skip
        self.model, self.captured = Model(), []
        self.forward = GraphForward(
            self.model, lambda: RecordingGraphs(self.captured), self.builder.padding, sizes
        )
        self.model.num_calls = self.step_id = 0
        self.known = {}
        for row in range(NUM_ROWS):
            self.add(row)

    def add(self, row):
        length = self.random.randint(12, 20)
        ids = [self.random.randrange(1, 1000) for _ in range(length)]
        tables = tuple(self.random.sample(range(1, 100), MAX_LEN // SIZE) for _ in range(2))
        self.known[row] = (ids, tables)
        new = NewRow(row, row, ids, length, length - 1, tables, SamplingParams(), 0)
        self.step_id += 1
        removed = [row] if self.rows.handles[row] >= 0 else []
        self.rows.apply(StepPlan(self.step_id, removed, [new], [], [], []))

    def step(self, decode, chunks=()):
        self.step_id += 1
        inputs = self.builder.build(StepPlan(self.step_id, [], [], [], decode, list(chunks)))
        self.builder.gather(inputs)
        hidden = self.forward(inputs.batch, samples_all=inputs.last is None)
        for times, aux in zip((2, 3), hidden.aux, strict=True):
            assert torch.equal(aux, times * hidden.last)
        return inputs, hidden

    def expected(self, row):
        ids, tables = self.known[row]
        position = int(self.rows.num_computed[row])
        slots = [t[position // SIZE] * SIZE + position % SIZE for t in tables]
        return [ids[position], position, *slots]

    def advance(self, inputs):
        new = [self.random.randrange(1, 1000) for _ in inputs.sampled]
        self.rows.write(inputs.sampled_rows, inputs.sampled_at, torch.tensor(new))
        self.rows.advance(inputs.rows, inputs.counts, inputs.sampled)
        for row, token in zip(inputs.sampled.tolist(), new, strict=True):
            self.known[row][0].append(token)


@pytest.mark.parametrize("most", [1, 2, 5, 64, 65, 200, 256, 300, 512, 1024])
def test_sizes_reach_the_most_and_pad_little(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    assert len(sizes) <= 16
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows or size - rows < 128
    assert len(decode_sizes(256)) == 10


def test_the_largest_is_captured_first_and_each_once():
    bench = Bench(0, [1, 2, 4, 11])
    assert [len(c.result.last) for c in bench.captured] == [11, 4, 2, 1]
    bench.forward.release()
    bench.forward.record()
    assert [len(c.result.last) for c in bench.captured] == [11, 4, 2, 1] * 2


@pytest.mark.parametrize("seed", range(6))
def test_decodes_replay_the_smallest_graph_that_holds_them(seed):
    sizes = [1, 2, 4, 8]
    bench = Bench(seed, sizes)
    by_size = {len(c.result.last): c for c in bench.captured}
    for _ in range(12):
        count = bench.random.randint(1, NUM_ROWS)
        decode = bench.random.sample(range(NUM_ROWS), count)
        for _ in range(2):  # the second is a steady decode
            replays = {size: c.num_replays for size, c in by_size.items()}
            inputs, hidden = bench.step(decode)
            size = next((s for s in sizes if s >= count), None)
            for found in sizes:
                assert by_size[found].num_replays - replays[found] == (found == size)
            last = hidden.last
            assert last[:count].tolist() == [bench.expected(row) for row in decode]
            if size is not None:
                assert len(last) == size
                assert last[count:].tolist() == [[0, 0, PAD_SLOT, PAD_SLOT]] * (size - count)
                assert hidden is by_size[size].result
            bench.advance(inputs)
        if bench.random.random() < 0.5:
            bench.add(bench.random.randrange(NUM_ROWS))


def test_steps_with_chunks_run_as_they_are():
    bench = Bench(3, [1, 2, 4, 8])
    for chunk in (Chunk(2, 1, True), Chunk(2, 3, False)):
        inputs, hidden = bench.step([0, 1], [chunk])
        assert len(hidden.last) == inputs.batch.num_tokens == 2 + chunk.num_tokens
    assert not any(c.num_replays for c in bench.captured)
    assert bench.model.num_calls == 2


def test_what_attention_reads_of_padding_is_one_key_of_the_null_block():
    bench = Bench(4, [8])
    inputs, _ = bench.step([3, 5, 9])
    for group in inputs.batch.groups:
        assert group.plan.seq_lens.tolist()[3:] == [1] * 5
    assert (bench.rows.tables[0][bench.rows.pad_row] == 0).all()
    assert inputs.rows.tolist() == [3, 5, 9] and len(inputs.sampled_rows) == 3


def test_a_step_that_is_not_where_it_was_captured_is_noticed():
    bench = Bench(5, [4])
    inputs, _ = bench.step([1, 2])
    inputs.batch.positions = inputs.batch.positions.clone()
    with pytest.raises(AssertionError, match="where it was captured"):
        bench.forward(inputs.batch, samples_all=True)


def test_the_null_row_survives_every_change():
    bench = Bench(6, [8])
    inputs, _ = bench.step(list(range(5)))
    bench.advance(inputs)
    assert int(bench.rows.token_ids[bench.rows.pad_row].sum()) == 0
    assert np.count_nonzero(bench.rows.num_computed[bench.rows.pad_row :]) == 0
