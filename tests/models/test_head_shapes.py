"""Models whose layers have different heads: paged, chunked, batched, against a dense model."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.positions import Rope
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm
from quire.ops import select
from tests.models.dense_reference import run_dense
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error, run_chunked

NATIVE, REASON = find_native()
NORM = Norm(eps=0.05)


def attention(heads, kv_heads, head_dim, window=None, theta=1e3, **facts):
    """Half of each head rotates."""
    rope = Rope(theta, head_dim // 2)
    return Attention(heads, kv_heads, head_dim, 0.4, rope, window, **facts)


def decoder(*mixers, dim=48, vocab=96):
    blocks = tuple(Block(mixer, Mlp(56), NORM) for mixer in mixers)
    return Decoder(vocab, dim, blocks, NORM, context=64)


MODELS = {
    # Gemma 4's: wide heads that see everything, narrow ones with a window, their blocks as large
    "wide and sliding": decoder(
        attention(4, 4, 16, window=5),
        attention(4, 1, 32),
        attention(4, 4, 16, window=5),
        attention(4, 1, 32),
    ),
    "no common size": decoder(
        attention(6, 3, 8, window=4), attention(4, 2, 8), attention(6, 3, 8, window=4)
    ),
    "all see everything": decoder(attention(4, 2, 16), attention(4, 1, 24), attention(4, 2, 16)),
    "two windows": decoder(
        attention(4, 2, 8, window=3), attention(8, 2, 32, window=7), attention(4, 1, 40)
    ),
}
MODELS["gated"] = decoder(attention(4, 2, 16, gate="full"), attention(4, 1, 24, gate="full"))
PROMPTS = [torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length))
           for length in (1, 13, 30, 8)]  # fmt: skip


def ops_of(provider):
    if provider == "cpu" and NATIVE is None:
        pytest.skip(REASON)
    runtime = CpuRuntime(num_threads=2) if provider == "cpu" else None
    return select(device="cpu", dtype=torch.float32, providers=[provider], runtime=runtime)


def load(spec, ops, seed=3, **keywords):
    return load_model(
        *(None, spec, ops),
        dtype=torch.float32,
        load_format="dummy",
        seed=seed,
        options=ModelOptions(**keywords),
    )


def test_the_blocks_of_these_models():
    def sizes(name):
        pool = PagedRun(load(MODELS[name], ops_of("torch")), PROMPTS).pool
        return [(g.window, g.block_size, len(g.layers)) for g in pool.groups], [
            round(pool.unused(group), 2) for group in pool.groups
        ]

    assert sizes("wide and sliding") == ([(None, 8, 2), (5, 4, 2)], [0, 0])
    assert sizes("no common size") == ([(None, 4, 1), (4, 4, 1), (4, 4, 1)], [0.33, 0, 0])
    assert sizes("all see everything") == ([(None, 4, 3)], [0])
    assert sizes("two windows") == ([(None, 4, 1), (3, 16, 1), (7, 4, 1)], [0.38, 0, 0])


@pytest.mark.parametrize("provider", ["torch", "cpu"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_paged_chunked_and_batched_equals_dense(name, provider):
    ops, spec = ops_of(provider), MODELS[name]
    model = load(spec, ops)
    truth = [run_dense(spec, 3, ids)[0] for ids in PROMPTS]
    run = PagedRun(model, PROMPTS, ops=ops)
    whole = run.step([len(p) for p in PROMPTS])
    assert relative_error([whole[r] for r in range(len(PROMPTS))], truth) < TOLERANCE
    for seed in range(3):
        assert relative_error(run_chunked(model, PROMPTS, seed, ops=ops), truth) < TOLERANCE


@torch.inference_mode()
def test_a_reference_with_other_heads_is_noticed():
    """The comparison is sensitive: one layer's window, or which heads share keys."""
    model, ops = load(MODELS["wide and sliding"], ops_of("torch")), ops_of("torch")
    run = PagedRun(model, PROMPTS, ops=ops).step([len(p) for p in PROMPTS])
    other = decoder(
        *(b.mixer for b in MODELS["wide and sliding"].blocks[:2]),
        attention(4, 4, 16, window=6),
        attention(4, 1, 32),
    )
    truth = [run_dense(other, 3, ids)[0] for ids in PROMPTS]
    assert relative_error([run[r] for r in range(len(PROMPTS))], truth) > 100 * TOLERANCE


PAIRS = {
    "smaller heads": decoder(attention(4, 1, 24), dim=32),
    "the same heads": decoder(attention(2, 2, 16), attention(2, 2, 16), dim=24),
    "another window": decoder(attention(2, 1, 8, window=3), dim=24),
}


@pytest.mark.parametrize("provider", ["torch", "cpu"])
@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
def test_a_second_model_in_the_pool_disturbs_neither(name, provider):
    """Both models compute the same steps over the same blocks, one after the other."""
    ops, spec = ops_of(provider), MODELS["all see everything"]
    model = load(spec, ops)
    second = load(PAIRS[name], ops, seed=4, first_layer=len(spec.blocks))
    run = PagedRun(model, PROMPTS, models=[model, second], ops=ops)
    truths = [
        [run_dense(m.spec, seed, ids)[0] for ids in PROMPTS]
        for m, seed in ((model, 3), (second, 4))
    ]
    for counts in ([1, 5, 12, 3], [0, 5, 1, 1], [0, 3, 17, 4]):
        before = list(run.computed)
        drafted = run.logits(counts, second)
        for r, logits in run.step(counts).items():
            part = slice(before[r], before[r] + counts[r])
            assert relative_error([logits], [truths[0][r][part]]) < TOLERANCE
            assert relative_error([drafted[r]], [truths[1][r][part]]) < TOLERANCE
