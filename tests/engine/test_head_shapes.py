"""The whole engine over a model whose layers differ in heads and window: blocks of different sizes
in one pool, crowded, chunked, preempted, with prefix hits.
"""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import LoadError
from quire.hardware.native import find_native
from quire.models import families
from quire.models.families.llama import RULES
from quire.models.positions import Rope
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm
from quire.params import SamplingParams
from tests.models.dense_reference import run_dense
from tests.support.simulation import invariants

NATIVE, REASON = find_native()
LENGTH, VOCAB, TOKENS = 96, 80, 30
ARCHITECTURE = "WideAndSlidingForCausalLM"


def decoder():
    def block(heads, kv_heads, head_dim, window):
        rope = Rope(1e3, head_dim // 2)
        return Block(
            Attention(heads, kv_heads, head_dim, 0.4, rope, window), Mlp(56), Norm(eps=0.05)
        )

    sliding, wide = block(4, 4, 16, 6), block(4, 1, 32, None)
    blocks = (sliding, sliding, wide, sliding, sliding, wide)
    return Decoder(VOCAB, 48, blocks, Norm(eps=0.05), context=LENGTH)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that names an architecture which only this test has."""
    name = "wide_and_sliding"
    module = types.ModuleType(f"{families.__name__}.{name}")
    module.FAMILY = Family((ARCHITECTURE,), lambda config: decoder(), RULES)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(families._HOMES, ARCHITECTURE, name)
    config = {"architectures": [ARCHITECTURE], "max_position_embeddings": LENGTH}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def plan_of(folder, **wishes):
    args = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 4} | wishes
    args |= {"dtype": "float32", "load_format": "dummy", "seed": 5, "device": "cpu"}
    return make_plan(EngineArgs(model=str(folder), skip_tokenizer_init=True, **args))


def prompts():
    drawn = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    shared = ((20, 20), (20, 16), (17, 12), (13, 8), (9, 8), (5, 3), (4, 0), (1, 0))
    return [drawn[:head] + drawn[20 + i : 20 + i + n - head] for i, (n, head) in enumerate(shared)]


def run(core, requests):
    """Greedy tokens of all requests, disturbed now and then."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = {handle: [] for handle in requests}
    for handle, ids in requests.items():
        request = EngineCoreRequest(handle, ids, params.clone(), seed=0, arrival_time=0.0)
        core.add_request(request)
    steps = 0
    while core.has_work:
        steps += 1
        if steps % 40 == 0:
            perform(core, "reset_prefix_cache", (True,))
        out = core.step()
        invariants.check(core.scheduler)
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            outputs[handle].append(token)
    return outputs


def crowded(folder, **wishes):
    """Tokens of all requests together, in a pool that is too small for them."""
    core = build_core(plan_of(folder, num_gpu_blocks_override=60, max_model_len=LENGTH, **wishes))
    outputs = run(core, dict(enumerate(prompts())))
    counters = core.scheduler.counters
    assert counters.num_preemptions > 0 and counters.prefix_hits > 0
    core.shutdown()
    return outputs


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_greedy_tokens_equal_the_dense_model_s(folder, eager):
    for handle, tokens in crowded(folder, enforce_eager=eager).items():
        ids = prompts()[handle]
        assert len(tokens) == TOKENS
        logits, _ = run_dense(decoder(), 5, torch.tensor(ids + tokens[:-1]))
        assert logits[len(ids) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.skipif(NATIVE is None, reason=REASON)
def test_with_scales_a_crowd_changes_no_token(folder):
    outputs = crowded(folder, kv_cache_dtype="int8")
    core = build_core(plan_of(folder, num_gpu_blocks_override=60, kv_cache_dtype="int8"))
    for handle, ids in enumerate(prompts()):
        assert run(core, {handle: ids}) == {handle: outputs[handle]}
    core.shutdown()


def test_the_plan_counts_blocks_of_both_sizes(folder):
    plan = plan_of(folder, num_gpu_blocks_override=60, max_model_len=LENGTH)
    block = 2 * 4 * (2 * 4 * 16) * 4  # layers of a group, tokens, keys and values of a token, bytes
    assert plan.memory.kv_cache_bytes == 60 * block
    assert (
        "2 layers full in blocks of 8 tokens, 2 layers window 6, 2 layers window 6"
        in plan.reasons["kv_cache_bytes"]
    )
    needed = 12 + 2 * 3  # of 96 tokens, and of a window and one token more
    with pytest.raises(LoadError, match=f"needs {needed} KV blocks of 4 or 8 tokens"):
        plan_of(folder, num_gpu_blocks_override=needed, max_model_len=LENGTH)
    fits = plan_of(folder, num_gpu_blocks_override=needed, max_model_len=-1).model.max_model_len
    assert fits == LENGTH - 8
