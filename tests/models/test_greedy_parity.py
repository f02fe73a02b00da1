"""The whole engine against transformers or our reference: greedy tokens and log-probabilities."""

from dataclasses import replace

import pytest
import torch

from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.layer_memory import NumberBytes
from quire.params import SamplingParams
from tests.models.hostile.models import HOSTILE, cases, make, oracle
from tests.support.crowded_engine import engine, greedy_after, prompts, run

NUM_PROMPTS = 8
MAX_TOKENS = 64
LENGTH = 96
ACCURACY = 2e-4  # of log-probabilities
FIXED_LENGTH = {"phi3"}  # its frequencies change at the original length
LEADS = {"deepseek_v4": 32}
"""How many tokens all prompts begin with, where blocks have more than prompts have."""


def longer(name):
    """The hostile model with room for 64 tokens behind the longest prompt."""
    hostile = HOSTILE[name]
    if name in FIXED_LENGTH:
        return hostile
    length = LENGTH + LEADS.get(name, 0)
    keys = {**hostile.keys, hostile.length_key: length}
    return replace(hostile, keys=keys, max_model_len=length)


def num_blocks(group, length):
    """Blocks for two requests of this length; some more where they do not grow with it."""
    return 2 * -(-length // group.block_size) if group.kind == "full" else 12


@pytest.mark.parametrize("name", cases())
def test_greedy_tokens_and_chances_equal_the_oracle_s(name, tmp_path):
    hostile = longer(name)
    made = make(hostile, tmp_path)
    pool = plan_kv_pool(memories_of([read_spec(read_config(made.folder))]), 4, NumberBytes(4, 4))
    # Full attention: two requests of full length fit. Windows and states alone never run out, so
    # there preemption is forced now and then.
    grows = any(group.kind == "full" for group in pool.groups)
    blocks = 1 + sum(num_blocks(group, hostile.max_model_len) for group in pool.groups)
    core = engine(
        made.folder,
        max_model_len=hostile.max_model_len,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=blocks,
    )
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    lead = [7 + i % 5 for i in range(LEADS.get(name, 0))]
    requests = {i: (lead + ids, params.clone()) for i, ids in enumerate(prompts())}
    outputs = run(core, requests, preempt_every=None if grows else 25)
    assert core.scheduler.counters.num_preemptions > 0, "the pool was meant to be too small"
    assert core.scheduler.counters.prefix_hits > 0
    ask = oracle(hostile, made.folder)
    for handle, (ids, _) in requests.items():
        tokens = [token for token, _ in outputs[handle]]
        assert len(tokens) == min(MAX_TOKENS, hostile.max_model_len - len(ids))
        likeliest, chances = greedy_after(ask, ids, tokens)
        assert tokens == likeliest
        found = torch.tensor([chance for _, chance in outputs[handle]])
        assert (found - chances).abs().max() < ACCURACY
