"""Hidden states that enter chosen layers: their values, and that no bit of logits changes."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.plain_ops import recordable
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.positions import Rope
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm
from quire.ops import select
from quire.params import SamplingParams
from quire.runner.batch import BatchBuilder
from quire.runner.devices.device import CpuDevice
from quire.runner.forward.decode_graphs import GraphForward
from quire.runner.forward.forward import EagerForward, RecordedForward
from quire.runner.rows import Rows
from quire.step.plan import Chunk, NewRow, StepPlan
from tests.models.dense_reference import run_dense
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.support.recorded_graphs import RecordingGraphs

NATIVE, REASON = find_native()
LAYERS = 5
AUX = (0, 2, 3, LAYERS)
SIZE, MAX_LEN, CAPACITY, ROWS = 4, 32, 12, 3


def decoder():
    def block(window):
        return Block(Attention(4, 2, 16, 0.4, Rope(1e3, 16), window), Mlp(56), Norm(eps=0.05))

    windows = (None, 5, None, 5, None)
    return Decoder(70, 48, tuple(map(block, windows)), Norm(eps=0.05), context=MAX_LEN)


def load(ops, aux_layers=()):
    return load_model(
        *(None, decoder(), ops),
        dtype=torch.float32,
        load_format="dummy",
        options=ModelOptions(aux_layers=tuple(aux_layers)),
    )


def plain_ops():
    return select(device="cpu", dtype=torch.float32, providers=["torch"])


PROMPTS = [torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]), torch.tensor([27, 18, 28])]


@torch.inference_mode()
def test_they_are_the_residual_stream_before_the_layers():
    model = load(plain_ops(), AUX)
    run, seen = PagedRun(model, PROMPTS), []

    def forward(batch):
        seen.append(model.forward(batch))
        return seen[-1]

    logits = run.step([len(p) for p in PROMPTS], forward)
    truths = [run_dense(model.spec, 0, ids) for ids in PROMPTS]
    assert relative_error(list(logits.values()), [t[0] for t in truths]) < TOLERANCE
    for layer, aux in zip(AUX, seen[0].aux, strict=True):
        expected = torch.cat([entering[layer] for _, entering in truths])
        assert aux.shape == (14, 48)
        assert relative_error([aux], [expected]) < TOLERANCE, f"layer {layer}"


@torch.inference_mode()
def test_pieces_hand_out_those_of_their_layers():
    model = load(plain_ops(), AUX)
    run, found = PagedRun(model, PROMPTS), []

    def layer_by_layer(batch):
        whole = model.forward(batch)
        states, aux = model.forward(batch, slice(0, 0)), []
        for i in range(LAYERS):
            if i in AUX:
                aux.append(states.last)
            states = model.forward(batch, slice(i, i + 1), states.last)
            found.append(len(states.aux))
        assert torch.equal(states.last, whole.last)
        for ours, theirs in zip(aux, whole.aux, strict=False):
            assert torch.equal(ours, theirs)
        return whole

    run.step([5, 3], layer_by_layer)
    assert found == [1, 0, 1, 1, 1]


class Bench:
    """Rows, and a model whose steps are run in one of the ways there are."""

    def __init__(self, way, aux_layers):
        runtime = CpuRuntime(num_threads=2)  # its attention plans stay where they are recorded
        self.ops = recordable(select(device="cpu", dtype=torch.float32, runtime=runtime), runtime)
        model = load(self.ops, aux_layers)
        run = PagedRun(model, [torch.zeros(MAX_LEN)] * ROWS, ops=self.ops)
        pool, device, sizes = run.pool, CpuDevice(), (1, 2, 3) if way == "graphs" else ()
        self.rows = Rows(
            num_rows=ROWS, max_len=MAX_LEN, block_sizes=[SIZE] * len(pool.groups), device=device
        )
        self.tables = [tuple(group[row] for group in run.tables) for row in range(ROWS)]
        self.batches = BatchBuilder(
            rows=self.rows, ops=self.ops, device=device, pool=pool, kv=run.kv, capacity=CAPACITY,
            sizes=sizes,
        )  # fmt: skip
        self.captured = []
        if way == "graphs":
            self.forward = GraphForward(
                model, lambda: RecordingGraphs(self.captured), self.batches.padding, sizes
            )
        elif way == "recorded":
            batch = self.batches.capacity_batch
            self.forward = RecordedForward(model, runtime, batch, num_rows=ROWS)
        else:
            self.forward = EagerForward(model)
        self.step_id = 0

    def step(self, decode, chunks=(), added=()):
        """The step's logits and auxiliary states, without padding."""
        self.step_id += 1
        plan = StepPlan(self.step_id, [], list(added), [], list(decode), list(chunks))
        self.rows.apply(plan)
        inputs = self.batches.build(plan)
        self.batches.gather(inputs)
        states = self.forward(inputs.batch, samples_all=inputs.last is None)
        count, sampled = int(inputs.counts.sum()), len(inputs.sampled)
        logits = self.forward.logits(states.last, inputs.last)[:sampled].clone()
        aux = [state[:count].clone() for state in states.aux]
        ids = torch.arange(sampled) + 7 * self.step_id % 60
        self.rows.write(inputs.sampled_rows, inputs.sampled_at, ids)
        self.rows.advance(inputs.rows, inputs.counts, inputs.sampled)
        return logits, aux

    @torch.inference_mode()
    def run(self):
        """Prompts in pieces, then decodes of fewer rows and of all."""
        prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [16, 18, 3]]
        added = [
            NewRow(row, row, ids, len(ids), 0, self.tables[row], SamplingParams(), 0)
            for row, ids in enumerate(prompts)
        ]
        return [
            self.step([], [Chunk(0, 5, False), Chunk(1, 3, True), Chunk(2, 3, True)], added),
            self.step([1, 2], [Chunk(0, 3, True)]),
            self.step([0, 1, 2]),
            self.step([0, 1, 2]),
            self.step([1]),
            self.step([2, 0]),
        ]


@pytest.mark.skipif(NATIVE is None, reason=REASON)
@pytest.mark.parametrize("way", ["eager", "recorded", "graphs"])
def test_every_way_to_run_a_step_hands_them_out(way):
    expected = Bench("eager", AUX).run()
    bench = Bench(way, AUX)
    found = bench.run()
    for (logits, aux), (true_logits, true_aux) in zip(found, expected, strict=True):
        assert torch.equal(logits, true_logits)
        assert len(aux) == len(AUX) and all(map(torch.equal, aux, true_aux))
    if way == "graphs":
        assert sum(graph.num_replays for graph in bench.captured) == 4
    plain = Bench(way, ()).run()
    for (logits, _), (same_logits, none) in zip(found, plain, strict=True):
        assert torch.equal(logits, same_logits) and none == []


@pytest.mark.parametrize("wrong", [[3, 1], [1, 1], [-1], [LAYERS + 1]])
def test_layers_that_are_not_there_are_refused(wrong):
    with pytest.raises(ValueError, match=f"layers 0 to {LAYERS} of this model"):
        load(plain_ops(), wrong)
