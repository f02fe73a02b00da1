"""Promise P4: a request has the same answer, bit for bit, whatever else the engine does.

Tokens and logprobs of every prompt alone are compared with those in a crowd, in small chunks, after
prefix hits, after preemption, and with another number of threads.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire import LLM, SamplingParams
from quire.hardware.native import find_native
from quire.kernels.cpu.linear_ops import LinearOps
from quire.observability.metrics import Counter
from quire.testing import make_checkpoint

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

NUM_PROMPTS = 32
NUM_OUTPUT = 10
MOE = {
    "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SLIDING = {"num_hidden_layers": 2, "sliding_window": 11}
SOFTCAP = {
    "num_hidden_layers": 2, "sliding_window": 9, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
SHARED = {
    "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
CHUNKED = {
    "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "intermediate_size_mlp": 64,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32, "floor_scale": 9,
}  # fmt: skip
STREAMS = {
    "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 8,
    "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0], "altup_num_inputs": 3,
}  # fmt: skip
BESIDE = {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 2, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024,
    "global_head_dim": 64, "num_global_key_value_heads": 1, "query_pre_attn_scalar": None,
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40,
    "rope_theta": None, "rope_local_base_freq": None,
}  # fmt: skip
TINY = {
    "moe": ("qwen3_moe", MOE),
    "shared": ("llama", SHARED),
    "chunked": ("llama", CHUNKED),
    "sliding": ("mistral", SLIDING),
    "softcap": ("gemma2", SOFTCAP),
    "streams": ("gemma3", STREAMS),
    "beside": ("gemma3", BESIDE),
    "latent": ("youtu", {"num_hidden_layers": 2}),
}
EMBEDDED = {"dtype": "bfloat16"}
MODELS = {
    "bfloat16": EMBEDDED,
    "int8": EMBEDDED | {"quantization": "int8"},
    "int4": EMBEDDED | {"quantization": "int4"},
    "int8-kv": EMBEDDED | {"kv_cache_dtype": "int8"},
    "moe": {},
    "moe-int4": {"quantization": "int4"},
    "shared": {},
    "chunked": {},
    "sliding": {},
    "sliding-int8-kv": {"kv_cache_dtype": "int8"},
    "softcap": {},
    "streams": {},
    "streams-int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "beside": {},
    "latent": {},
}
SMALL_POOL = {"sliding": 6, "softcap": 9, "streams": 9, "beside": 9, "chunked": 24}
"""Blocks with which such models preempt; others have 12."""
RARE = ("chunked", "streams", "streams-int4", "beside")
ALONE = {"cpu_threads": 2, "enable_prefix_caching": False}
LOADS = {
    "one thread, chunks of 16": {"cpu_threads": 1, "max_num_batched_tokens": 16},
    "tiny pool, chunks of 7": {"num_gpu_blocks_override": "few", "max_num_batched_tokens": 7},
    "prefix hits": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name), shape, family)
        for name, (family, shape) in TINY.items()
    }


def open_llm(folders, name, **args):
    wishes = {"max_num_seqs": NUM_PROMPTS, "max_model_len": 96, "block_size": 16, "seed": 3}
    model = folders.get(name.split("-")[0])
    wishes |= {"model": str(model) if model else None, "skip_tokenizer_init": True}
    if args.get("num_gpu_blocks_override") == "few":
        args = args | {"num_gpu_blocks_override": SMALL_POOL.get(name.split("-")[0], 12)}
    most = min(NUM_PROMPTS, args.get("max_num_batched_tokens", NUM_PROMPTS))
    return LLM(**wishes | MODELS[name] | {"max_num_seqs": most} | args)


def requests():
    """Prompts that share beginnings, every second one sampled; some want prompt logprobs."""
    draw = random.Random(4)
    starts = [[draw.randrange(1, 1000) for _ in range(48)] for _ in range(3)]
    prompts, params = [], []
    for i in range(NUM_PROMPTS):
        ends = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 30))]
        prompts.append({"prompt_token_ids": starts[i % 3][: draw.choice([0, 17, 48])] + ends})
        sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": i} if i % 2 else {}
        params.append(
            SamplingParams(
                **{"temperature": 0.0} | sampled,
                max_tokens=NUM_OUTPUT,
                ignore_eos=True,
                logprobs=3,
                prompt_logprobs=1 if i % 8 == 2 else None,
                detokenize=False,
            )
        )
    return prompts, params


def figures(entries):
    """Token ids and logprobs of some positions, to the last bit."""
    return [e and [(t, v.logprob, v.rank) for t, v in e.items()] for e in entries or ()]


def answers(outputs):
    return [
        (list(c.token_ids), figures(c.logprobs), figures(output.prompt_logprobs))
        for output in outputs
        for c in output.outputs
    ]


def run(llm, prompts, params):
    return answers(llm.generate(prompts, params, use_tqdm=False))


def metric(llm, ending):
    found = (m for m in llm.get_metrics() if isinstance(m, Counter))
    return sum(m.value for m in found if m.name.endswith(ending))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sharp(when=lambda name: name not in RARE)
def test_an_answer_does_not_depend_on_the_load(name, folders):
    prompts, params = requests()
    with open_llm(folders, name, **ALONE) as llm:
        expected = [run(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        assert run(llm, prompts, params) == expected, "in a crowd"
    assert len({str(answer) for answer in expected}) == len(expected)
    for load, args in LOADS.items():
        with open_llm(folders, name, **args, disable_log_stats=False) as llm:
            assert run(llm, prompts, params) == expected, load
            if "tiny pool" in load:
                assert metric(llm, "preemptions") > 0
            if "prefix" in load:
                before = metric(llm, "prefix_cache_hits")
                assert run(llm, prompts[::-1], params[::-1]) == expected[::-1], load
                assert metric(llm, "prefix_cache_hits") > before


def test_the_comparison_sees_a_sum_that_is_cut_when_rows_are_many(monkeypatch, folders):
    whole = LinearOps.linear

    def split(self, x, w):
        if len(x) == 1:
            return whole(self, x, w)
        first = x.clone()
        first[:, x.shape[1] // 2 :] = 0
        return whole(self, first, w) + whole(self, x - first, w)

    prompts, params = requests()
    monkeypatch.setattr(LinearOps, "linear", split)
    with open_llm(folders, "bfloat16", enforce_eager=True) as llm:
        alone = [run(llm, [p], [s])[0] for p, s in zip(prompts[:4], params[:4], strict=True)]
        assert run(llm, prompts[:4], params[:4]) != alone


def test_every_op_of_the_default_engine_is_invariant():
    from quire.ops import select

    ops = select(device="cpu", dtype=torch.bfloat16)
    assert ops.batch_invariant
