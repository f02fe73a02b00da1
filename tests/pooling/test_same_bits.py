"""A prompt's result has the same bits whatever else happens in the engine."""

import numpy as np
import pytest

from quire import LLM, PoolingParams
from quire.hardware.native import find_native
from tests.pooling import models

pytestmark = pytest.mark.skipif(
    find_native()[0] is None, reason="plain torch promises no equal bits in another batch"
)
POOLINGS = ("LAST", "MEAN", "CLS")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pooling")
    models.make(path, "Qwen3", "Model", is_matryoshka=True)
    return path


def pooled(folder, asked, pooling, *, task="embed", **options):
    """The results of prompts, asked all at once, and how many of their tokens were cached."""
    config = {"seq_pooling_type": pooling, "task": task}
    fixed = {"skip_tokenizer_init": True, "dtype": "bfloat16", "pooler_config": config}
    with LLM(str(folder), **{**fixed, **options}) as llm:
        outputs = llm.encode(asked, pooling_task=task, use_tqdm=False)
    return [o.outputs.data.numpy() for o in outputs], sum(o.num_cached_tokens for o in outputs)


def alone(folder, asked, pooling, **options):
    return [pooled(folder, [one], pooling, **options)[0][0] for one in asked]


def same(found, wanted):
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_in_a_crowd_in_chunks_and_preempted(folder, pooling):
    asked = models.prompts(seed=1, lengths=(33, 7, 160, 97, 64, 1))
    wanted = alone(folder, asked[:4], pooling)
    same(pooled(folder, asked, pooling)[0][:4], wanted)
    for tokens in (7, 50):
        same(pooled(folder, asked, pooling, max_num_batched_tokens=tokens)[0][:4], wanted)
    small = {"num_gpu_blocks_override": 12, "block_size": 16, "max_num_batched_tokens": 40}
    same(pooled(folder, asked, pooling, **small)[0][:4], wanted)


@pytest.mark.parametrize(
    ("pooling", "task"),
    [("LAST", "embed"), ("LAST", "token_embed"), ("MEAN", "embed"), ("CLS", "embed")],
)
def test_after_tokens_in_the_prefix_cache(folder, pooling, task):
    asked = models.prompts(seed=2, lengths=(100, 100))
    asked = [asked[0], asked[0][:80] + asked[1][:30], asked[0]]
    wanted = alone(folder, asked, pooling, task=task)
    options = {"max_num_seqs": 1, "enable_prefix_caching": True}
    found, num_cached = pooled(folder, asked, pooling, task=task, **options)
    same(found, wanted)
    is_enough = (pooling, task) == ("LAST", "embed")
    assert (num_cached > 0) is is_enough, "a cached block has no hidden states"


def test_vectors_of_several_sizes(folder):
    asked = models.prompts(seed=3, lengths=(20, 40, 60))
    sizes = [PoolingParams(dimensions=size) for size in (5, 48, 17)]
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32") as llm:
        together = llm.embed(asked, pooling_params=sizes, use_tqdm=False)
        for ids, params, output in zip(asked, sizes, together, strict=True):
            [one] = llm.embed(ids, pooling_params=params, use_tqdm=False)
            assert one.outputs.embedding == output.outputs.embedding
            assert output.outputs.hidden_size == params.dimensions
            assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1, abs=1e-6)
