"""Two models with their layers in one pool of blocks, each with a runner of its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.plain_ops import recordable
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.layer_memory import NumberBytes
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.positions import Rope
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm
from quire.ops import select
from quire.params import SamplingParams
from quire.runner.batch import BatchBuilder
from quire.runner.devices.device import CpuDevice
from quire.runner.forward.forward import EagerForward, RecordedForward
from quire.runner.kv_cache import KVCache
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler
from quire.runner.token_head import TokenHead
from quire.step.plan import Chunk, NewRow, StepPlan
from tests.models.dense_reference import run_dense

NATIVE, REASON = find_native()
NUM_ROWS, MAX_LEN, SIZE, CAPACITY = 3, 32, 4, 16
NUM_BLOCKS = 80
VOCAB = 60
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [27, 18, 28], [31, 41, 59, 2, 6, 53, 5, 8, 9, 7, 9, 3]]
TOKENS = 9


def decoder(dim, *shapes):
    """Of one layer per (heads, KV heads, head dim, window)."""
    blocks = tuple(
        Block(Attention(heads, kv, dim_, 0.4, Rope(1e3, dim_), window), Mlp(40), Norm(eps=0.05))
        for heads, kv, dim_, window in shapes
    )
    return Decoder(VOCAB, dim, blocks, Norm(eps=0.05), context=MAX_LEN)


TARGET = decoder(48, (4, 2, 16, None), (4, 2, 8, 5), (4, 1, 24, None))
DRAFT = decoder(24, (2, 1, 8, None), (2, 2, 16, 5))
SEEDS = {TARGET: 3, DRAFT: 4}


class Engine:
    """Runners of some models over one pool, and what a scheduler would tell them."""

    def __init__(self, specs, provider):
        runtime = CpuRuntime(num_threads=2) if provider == "cpu" else None
        self.ops = select(device="cpu", dtype=torch.float32, providers=[provider], runtime=runtime)
        if runtime is not None:
            self.ops = recordable(self.ops, runtime)
        pool = plan_kv_pool(memories_of(specs), SIZE, NumberBytes(4, 4))
        self.kv_cache = KVCache(ops=self.ops, pool=pool, num_blocks=NUM_BLOCKS, dtype=torch.float32)
        free = iter(range(NUM_BLOCKS - 1, 0, -1))
        self.tables = [
            tuple([next(free) for _ in range(-(-MAX_LEN // g.block_size))] for g in pool.groups)
            for _ in PROMPTS
        ]
        self.runners, first = [], 0
        for spec in specs:
            self.runners.append(self._runner(spec, first, runtime))
            first += len(spec.blocks)
        self.step_id = 0

    def _runner(self, spec, first_layer, runtime):
        device, pool = CpuDevice(), self.kv_cache.pool
        model = load_model(
            None, spec, self.ops, dtype=torch.float32, load_format="dummy", seed=SEEDS[spec],
            options=ModelOptions(first_layer=first_layer),
        )  # fmt: skip
        rows = Rows(
            num_rows=NUM_ROWS,
            max_len=MAX_LEN,
            block_sizes=[group.block_size for group in pool.groups],
            device=device,
        )
        batches = BatchBuilder(
            rows=rows, ops=self.ops, device=device, pool=pool, kv=self.kv_cache.layers,
            capacity=CAPACITY,
        )  # fmt: skip
        forward = EagerForward(model)
        if runtime is not None:
            forward = RecordedForward(model, runtime, batches.capacity_batch, num_rows=NUM_ROWS)
        sampler = Sampler(
            ops=self.ops, num_rows=NUM_ROWS, vocab_size=VOCAB, device=device, history=rows,
            max_logprobs=0, logprobs_mode="raw_logprobs",
        )  # fmt: skip
        runner = ModelRunner(
            model=model, rows=rows, batches=batches, kv_cache=self.kv_cache, device=device,
            forward=forward,
        )  # fmt: skip
        head = TokenHead(model=model, forward=forward, rows=rows, sampler=sampler, device=device)
        runner.register(SamplingParams, head)
        return runner

    def outputs(self):
        """The tokens of each model for each prompt; the models take turns, step by step."""
        found = [[[] for _ in PROMPTS] for _ in self.runners]
        added = [self._new_row(row) for row in range(len(PROMPTS))]
        chunks = [Chunk(row, 5, False) if len(p) > 5 else Chunk(row, len(p), True)
                  for row, p in enumerate(PROMPTS)]  # fmt: skip
        self._step(found, added=added, chunks=chunks)
        chunks = [Chunk(r, len(p) - 5, True) for r, p in enumerate(PROMPTS) if len(p) > 5]
        self._step(found, decode=[1], chunks=chunks)
        decode = list(range(len(PROMPTS)))
        while min(map(len, found[-1])) < TOKENS:
            self._step(found, decode=decode)
        return [[tokens[:TOKENS] for tokens in rows] for rows in found]

    def _new_row(self, row):
        params = SamplingParams(temperature=0.0)
        ids = PROMPTS[row]
        return NewRow(row, row, ids, len(ids), 0, self.tables[row], params, seed=0)

    def _step(self, found, decode=(), added=(), chunks=()):
        self.step_id += 1
        plan = StepPlan(self.step_id, [], list(added), [], list(decode), list(chunks))
        for runner, tokens in zip(self.runners, found, strict=True):
            step = runner.launch(plan)
            step.sample()
            for row, token in zip(plan.sampled_rows, step.result().result.token_ids, strict=True):
                tokens[row].append(token)


def greedy(spec, prompt):
    ids = list(prompt)
    for _ in range(TOKENS):
        logits, _ = run_dense(spec, SEEDS[spec], torch.tensor(ids))
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("provider", ["torch", "cpu"])
def test_both_decode_right_alone_and_together(provider):
    if provider == "cpu" and NATIVE is None:
        pytest.skip(REASON)
    expected = [[greedy(spec, prompt) for prompt in PROMPTS] for spec in (TARGET, DRAFT)]
    together = Engine([TARGET, DRAFT], provider)
    assert together.outputs() == expected
    for spec, tokens in zip((TARGET, DRAFT), expected, strict=True):
        assert Engine([spec], provider).outputs() == [tokens]
    again = Engine([TARGET, DRAFT], provider)
    again.kv_cache.zero(range(NUM_BLOCKS))
    again.runners = again.runners[::-1]
    assert again.outputs() == expected[::-1]


def test_the_layers_of_both_models_share_the_pool():
    kv_cache = Engine([TARGET, DRAFT], "torch").kv_cache
    pool = kv_cache.pool
    assert [(g.kind, g.layers, g.block_size) for g in pool.groups] == [
        ("full", (0, 2), 4), ("full", (3,), 16), ("sliding", (4, 1), 4)
    ]  # fmt: skip
    assert len(kv_cache.layers) == 5
    alone = [Engine([spec], "torch").kv_cache for spec in (TARGET, DRAFT)]
    assert kv_cache.nbytes < sum(cache.nbytes for cache in alone)


def test_block_ids_are_sent_to_the_device_once_for_all_layers():
    sent = []

    def send(ids):
        sent.append(ids.tolist())
        return torch.from_numpy(ids)

    pool = plan_kv_pool(memories_of([TARGET, DRAFT]), SIZE, NumberBytes(4, 4))
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    cache = KVCache(ops=ops, pool=pool, num_blocks=9, dtype=torch.float32, send=send)
    sent.clear()
    cache.copy([(1, 2), (3, 4)])
    cache.zero([5, 6])
    assert sent == [[1, 3], [2, 4], [5, 6]]


def test_what_lies_between_the_parts_of_a_block_is_zeros():
    engine = Engine([TARGET, DRAFT], "torch")
    for group in range(len(engine.kv_cache.pool.groups)):
        engine.kv_cache._parts[group] = [torch.ones(3, 5, dtype=torch.uint8) for _ in range(2)]
        size = engine.kv_cache.content_bytes(group)
        into = torch.full((size,), 0xAA, dtype=torch.uint8)
        engine.kv_cache.read_block(group, 1, into)
        assert size == 128 and into.sum() == 10


def test_copies_and_zeros_reach_the_layers_of_every_group():
    engine = Engine([TARGET, DRAFT], "torch")
    cache, ops = engine.kv_cache, engine.ops
    layers = cache.layers
    for number, kv in enumerate(layers):
        block = torch.full((1, 2, kv.block_size, kv.kv_heads, kv.head_dim), number + 1.0)
        ops.import_kv(kv, [10 + number], block)
    cache.copy([(10 + number, 20 + number) for number in range(5)])
    for number, kv in enumerate(layers):
        assert (ops.export_kv(kv, [20 + number]) == number + 1.0).all()
    cache.zero([21, 23])
    for number, kv in enumerate(layers):
        assert (ops.export_kv(kv, [20 + number]) == 0).all() == (number in (1, 3))
    layers_of = lambda block: [ops.export_kv(kv, [block]) for kv in layers]  # noqa: E731
    held = [layers_of(block) for block in range(24)]
    copies = [(10, 11), (11, 12), (13, 10), (20, 21), (20, 22), (12, 11)]
    cache.copy(copies)
    for source, target in copies:
        held[target] = held[source]
    for block, expected in enumerate(held):
        for now, before in zip(layers_of(block), expected, strict=True):
            assert torch.equal(now.isnan(), before.isnan())
            assert torch.equal(now.nan_to_num(), before.nan_to_num()), f"block {block}"
    cache.release()
    assert cache.nbytes == 0 and not layers
    cache.restore()
    assert cache.layers is layers and len(layers) == 5 and cache.nbytes > 0
