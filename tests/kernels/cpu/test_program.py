"""Recorded programs against immediate execution: bitwise, for any number of tokens."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch

from quire import embedded
from quire.kernels.cpu.plain_ops import recordable
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.runtime import CpuRuntime, huge_tensor
from quire.models import read_spec
from quire.models.loading.weights import load_model
from quire.ops import Batch, GroupBatch, NormWeight, select
from quire.ops.step_rows import StepRows
from tests.support.needs import needs_native

pytestmark = needs_native
CAPACITY, WIDTH, VOCAB = 64, 40, 50


class FakeModel:
    """Small ops in a row, one of them a Python function on torch tensors."""

    def __init__(self, dtype=torch.bfloat16, num_threads=2, depth=4):
        torch.manual_seed(0)
        self.dtype = dtype
        self.runtime = CpuRuntime(num_threads=num_threads)
        self.ops = select(device="cpu", dtype=dtype, providers=["cpu"], runtime=self.runtime)
        self.table = torch.randn(VOCAB, WIDTH).to(dtype)
        self.norms = [
            NormWeight(kind, 1e-3, torch.randn(WIDTH).to(dtype))
            for kind in ("rms", "layer", "rms1p", "rms_late_cast")
        ] * (depth // 4)
        self.heads = NormWeight("rms", 1e-3, torch.randn(4, WIDTH // 4).to(dtype))

    def python(self, x):
        return x.flip(1) * 0.5

    def recorded_python(self, x):
        program = self.runtime.program
        if program is None:
            return self.python(x)
        y = program.output(tuple(x.shape), x.dtype)
        source, place = program.borrow(x), program.borrow(y)

        def entry(num_tokens):
            place[:num_tokens].copy_(self.python(source[:num_tokens]))

        program.call(entry)
        return y

    def forward(self, ids):
        ops = self.ops
        x = ops.embed(ids, self.table, 1.5)
        h = ops.norm(x, self.norms[0])
        for n in self.norms:
            h = ops.scale_gate(h, ops.add(x, h))
            x, h = ops.add_norm(x, self.recorded_python(h), n, 0.7)
            h = ops.norm(h.unflatten(1, (4, -1)), self.heads).flatten(1)
        return ops.add(x, h)


def record(model, ids):
    program = Program(model.runtime, len(ids))
    with program.recording():
        hidden = model.forward(ids)
    return program, hidden


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_replay_has_the_bits_of_immediate_execution(dtype, num_threads):
    model = FakeModel(dtype, num_threads)
    ids = torch.zeros(CAPACITY, dtype=torch.int64)
    program, hidden = record(model, ids)
    for num_tokens in (*range(1, CAPACITY + 1), 0, 3):
        now = torch.randint(VOCAB, (num_tokens,))
        ids[:num_tokens] = now
        program.replay(num_tokens)
        assert torch.equal(hidden[:num_tokens], model.forward(now))


def test_recording_computes_nothing_and_memory_is_used_again():
    model = FakeModel(depth=40)
    ids = torch.full((CAPACITY,), 10**9)  # no row of the table: nobody may look
    program, hidden = record(model, ids)
    assert len(program) == 2 + 40 * 5 + 1
    assert program.nbytes <= 8 * CAPACITY * WIDTH * 2
    assert not model.runtime.program


def test_rows_beyond_the_step_are_not_read():
    model = FakeModel(torch.float32)
    ids = torch.zeros(CAPACITY, dtype=torch.int64)
    program, hidden = record(model, ids)
    program.replay(CAPACITY)
    ids[5:] = -1
    hidden.fill_(float("nan"))
    program.replay(5)
    assert torch.equal(hidden[:5], model.forward(ids[:5])) and hidden[5:].isnan().all()


def test_views_keep_their_memory():
    model = FakeModel(torch.float32)
    program = Program(model.runtime, 2)
    with program.recording():
        x = model.ops.embed(torch.tensor([1, 2]), model.table)
        view = x[:, :8]
        del x
        gc.collect()
        model.ops.embed(torch.tensor([3, 4]), model.table)
    program.replay(2)
    assert torch.equal(view, model.table[[1, 2], :8])


def test_weights_and_inputs_live_as_long_as_the_program():
    model = FakeModel(torch.float32)
    expected = model.forward(torch.tensor([7, 3]))
    program, hidden = record(model, torch.tensor([7, 3]))
    del model
    gc.collect()
    scraps = [torch.full((VOCAB, WIDTH), 3.0) for _ in range(50)]
    program.replay(2)
    assert torch.equal(hidden, expected) and scraps


def test_results_outlive_the_program():
    program, hidden = record(FakeModel(torch.float32), torch.tensor([7, 3]))
    program.replay(2)
    kept = hidden.clone()
    del program
    gc.collect()
    assert torch.equal(hidden, kept)


def test_what_goes_wrong_in_a_replay_is_raised():
    model = FakeModel()
    ids = torch.zeros(CAPACITY, dtype=torch.int64)
    program, _ = record(model, ids)
    ids[3] = VOCAB
    program.replay(3)
    with pytest.raises(IndexError):
        program.replay(4)
    for num_tokens in (-1, CAPACITY + 1):
        with pytest.raises(ValueError, match="capacity 64"):
            program.replay(num_tokens)

    def fail(num_tokens):
        raise KeyError(num_tokens)

    program.call(fail)
    with pytest.raises(KeyError, match="3"):
        program.replay(3)
    assert model.forward(ids[:2]).shape == (2, WIDTH), "the pool is free again"


def test_a_python_entry_may_run_ops_on_the_same_pool():
    model = FakeModel(torch.float32)
    wide = torch.ones(300, 1024)
    seen = []
    program = Program(model.runtime, 8)
    program.call(lambda num_tokens: seen.append(model.ops.add(wide, wide)[num_tokens, 0].item()))
    program.replay(8)
    assert seen == [2.0]


def test_only_whole_programs_are_recorded():
    model = FakeModel()
    program = Program(model.runtime, 8)
    with program.recording(), pytest.raises(AssertionError, match="as many tokens"):
        model.forward(torch.zeros(7, dtype=torch.int64))
    with program.recording(), pytest.raises(AssertionError, match="recorded already"):
        Program(model.runtime, 8).recording().__enter__()


class RecordedDecoder:
    """The embedded model, its steps replayed; ops without native kernels are Python entries."""

    def __init__(self, dtype, capacity):
        self.runtime = CpuRuntime(num_threads=2)
        ops = select(device="cpu", dtype=dtype, runtime=self.runtime)
        self.ops = recordable(ops, self.runtime)
        folder = embedded.path()
        spec = read_spec(json.loads((folder / "config.json").read_text()))
        self.model = load_model(folder, spec, self.ops, dtype=dtype, max_model_len=64)
        memories = [block.mixer.memory for block in spec.blocks]
        self.memory = lambda: [
            ops.allocate_kv(8, 8, memory.kv_heads, memory.head_dim, dtype) for memory in memories
        ]
        self.capacity = capacity
        self.plan = self.make_plan(0, 0)
        slots = torch.full((capacity,), -1)
        ids, positions = torch.zeros(capacity, dtype=torch.int64), torch.zeros(1, capacity).long()
        group = GroupBatch(slots, self.plan)
        self.layer_groups = [0] * len(spec.blocks)
        kv = self.memory()
        self.batch = Batch(ids, None, positions, [group], kv, self.layer_groups, capacity)
        self.program = Program(self.runtime, capacity)
        with self.program.recording():
            self.hidden = self.model.forward(self.batch).last

    def make_plan(self, start, stop):
        rows = int(stop > start)
        return self.ops.plan_attention(
            query_start=np.array([0, stop - start][: rows + 1], dtype=np.int32),
            seq_lens=np.array([stop][:rows], dtype=np.int32),
            block_table=torch.arange(8, dtype=torch.int32)[None][:rows],
            block_size=8,
            window=None,
        )

    def replay(self, ids, start):
        stop, batch = start + len(ids), self.batch
        batch.ids[: len(ids)] = ids
        batch.positions[0, : len(ids)] = torch.arange(start, stop)
        batch.groups[0].slots[: len(ids)] = torch.arange(start, stop)
        rows = np.zeros(1, dtype=np.int32)
        query_start = np.array([0, len(ids)], dtype=np.int32)
        table = np.arange(8, dtype=np.int32)[None]
        lengths = np.array([stop], dtype=np.int32)
        self.plan.refill(StepRows(query_start, lengths, table, rows))
        self.program.replay(len(ids))
        return self.hidden[: len(ids)].clone()

    def run(self, ids, start, kv):
        steps = torch.arange(start, start + len(ids))
        group = GroupBatch(steps, self.make_plan(start, start + len(ids)))
        batch = Batch(ids, None, steps[None], [group], kv, self.layer_groups, len(ids))
        return self.model.forward(batch).last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_a_recorded_decoder_has_the_bits_of_its_forward(dtype):
    decoder = RecordedDecoder(dtype, capacity=24)
    kv, start = decoder.memory(), 0
    for count in (9, 1, 1, 24, 3, 1):
        ids = torch.randint(5, 500, (count,))
        expected = decoder.run(ids, start, kv)
        assert torch.equal(decoder.replay(ids, start), expected)
        start += count


def test_huge_tensors_are_zeroed_aligned_and_freed_with_their_last_view():
    for shape in ((3,), (1 << 20, 3), (0, 4)):
        x = huge_tensor(shape, torch.bfloat16)
        assert x.shape == shape and x.dtype == torch.bfloat16 and not x.any()
    x = huge_tensor((3 << 20,), torch.float32)
    assert x.data_ptr() % (2 << 20) == 0
    x[-1] = 5
    view = x[-1:]
    del x
    gc.collect()
    assert view.item() == 5
