"""Lives of an engine on the double, for test_gpu_double. Prints JSON of one of them.

A life starts an engine with `device="cuda"`, lets it answer, and says what came of it, who waited
for the device after the start, and which kernels would have been compiled after it.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from tests.gpu.gpu_machine import install

gpu = install()

from quire import LLM, PoolingParams, SamplingParams, StructuredOutputsParams  # noqa: E402

SETTINGS = {
    "max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 16, "block_size": 16,
    "dtype": "float32",
}  # fmt: skip
PROMPTS = [[20, 21, 22, 23, 24, 25, 26, 27, 28], [30], [20, 21, 22, 23, 24]]


def greedy(**wishes):
    return SamplingParams(**{"max_tokens": 3, "ignore_eos": True, "temperature": 0.0} | wishes)


FEATURES = {
    "plain": greedy(),
    "logprobs": greedy(logprobs=3),
    "columns": greedy(logprob_token_ids=[5, 9]),
    "prompt": greedy(prompt_logprobs=2),
    "penalties": greedy(presence_penalty=0.5, repetition_penalty=1.3, logprobs=0),
    "bias": greedy(logit_bias={33: 0.5}),
    "allowed": greedy(allowed_token_ids=list(range(20, 90))),
    "min_tokens": greedy(min_tokens=2, stop_token_ids=[24]),
    "bad_words": greedy(bad_words=["a"]),
    "drawn": greedy(temperature=1.0, seed=4, top_p=0.9, min_p=0.01, top_k=20, logprobs=1),
    "several": greedy(temperature=1.0, seed=4, n=2),
    "grammar": SamplingParams(
        temperature=0.0, max_tokens=4, min_tokens=2,
        structured_outputs=StructuredOutputsParams(choice=["ab", "ba"]),
    ),
}  # fmt: skip


def answers(llm, kinds):
    """Tokens, and log-probabilities where they were asked for; a prompt for each kind, in turn."""
    prompts = [{"prompt_token_ids": PROMPTS[i % len(PROMPTS)]} for i in range(len(kinds))]
    outputs = llm.generate(prompts, kinds, use_tqdm=False)
    return [
        [[list(c.token_ids), described(c.logprobs)] for c in output.outputs]
        + [described((output.prompt_logprobs or [None])[1:])]
        for output in outputs
    ]


def described(columns):
    """As far as both devices agree: ids in the order of their values, and those."""
    return [
        [[i, round(v.logprob, 3)] for i, v in sorted(column.items())] for column in columns or ()
    ]


def beside_the_cpu(folder, names, offload=None, **settings):
    """What requests with these features get, there, where weights may be offloaded, and on the
    CPU.
    """
    kinds = [FEATURES[name] for name in names]
    settings = {"num_gpu_blocks_override": 12} | SETTINGS | settings
    with LLM(folder, device="cuda", **settings, **offload or {}) as llm:
        known = set(gpu.variants)
        gpu.waits.clear()
        found = answers(llm, kinds)
        waits, compiled = dict(gpu.waits), sorted({v[0] for v in gpu.variants - known})
    settings["deterministic"] = False  # a CPU without native kernels cannot promise it
    with LLM(folder, device="cpu", **settings) as llm:
        right = answers(llm, kinds)
    replays = sum(graph.num_replays for graph in gpu.graphs)
    return {
        "found": found, "right": right, "waits": waits, "compiled": compiled, "replays": replays,
    }  # fmt: skip


def vectors(folder):
    """What an encoder makes of tokens, there and on the CPU; a step has several prompts."""
    settings = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 64,
        "pooler_config": {"task": "token_embed"},
    }  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in (*PROMPTS, list(range(30, 90)))]

    def pooled(llm):
        outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        return [output.outputs.data.tolist() for output in outputs]

    with LLM(folder, device="cuda", **settings) as llm:
        known = set(gpu.variants)
        gpu.waits.clear()
        found = pooled(llm)
        waits, compiled = dict(gpu.waits), sorted({v[0] for v in gpu.variants - known})
    with LLM(folder, device="cpu", **settings) as llm:
        right = pooled(llm)
    return {"found": found, "right": right, "waits": waits, "compiled": compiled}


def both(folder):
    """Tokens and vectors of one engine, there and on the CPU; most steps are of both."""
    settings = SETTINGS | {"runner": "generate", "convert": "embed", "num_gpu_blocks_override": 12}
    settings |= {"max_num_seqs": 2, "max_num_batched_tokens": 4}
    settings |= {"pooler_config": {"task": "embed", "pooling_type": "MEAN"}}

    def answered(llm):
        engine, found = llm.llm_engine, {}
        for i, ids in enumerate(PROMPTS):
            prompt = {"prompt_token_ids": ids}
            engine.add_request(f"t{i}", prompt, greedy())
            engine.add_request(f"p{i}", prompt, PoolingParams(task="embed"))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        places = range(len(PROMPTS))
        tokens = [list(found[f"t{i}"].outputs[0].token_ids) for i in places]
        return tokens, [found[f"p{i}"].outputs.data.tolist() for i in places]

    with LLM(folder, device="cuda", **settings) as llm:
        known = set(gpu.variants)
        gpu.waits.clear()
        found = answered(llm)
        waits, compiled = dict(gpu.waits), sorted({v[0] for v in gpu.variants - known})
    with LLM(folder, device="cpu", **settings) as llm:
        right = answered(llm)
    replays = sum(graph.num_replays for graph in gpu.graphs)
    return {
        "found": found, "right": right, "waits": waits, "compiled": compiled, "replays": replays,
    }  # fmt: skip


def memory(folder, **offload):
    """A measured KV cache, sleep of both levels; bytes of the double at each stage."""
    kinds = [FEATURES["penalties"]]
    settings = SETTINGS | {"gpu_memory_utilization": 0.5, "deterministic": True} | offload
    with LLM(folder, device="cuda", **settings) as llm:
        stages = {"awake": gpu.used_bytes()}
        rounds = [answers(llm, kinds)]
        for level in (1, 2):
            llm.sleep(level)
            stages[f"asleep {level}"] = gpu.used_bytes()
            llm.wake_up()
            stages[f"awake after {level}"] = gpu.used_bytes()
            rounds.append(answers(llm, kinds))
        [kv_bytes] = llm.collective_rpc("kv_cache_bytes")
    return {"stages": stages, "rounds": rounds, "kv": kv_bytes, "total": gpu.total_bytes}


LIVES = {
    "features": partial(beside_the_cpu, names=FEATURES, deterministic=True),
    "some": partial(beside_the_cpu, names=["logprobs", "drawn"], deterministic=True),
    "varying": partial(beside_the_cpu, names=["logprobs", "drawn"]),
    "eager": partial(
        beside_the_cpu, names=["drawn"], enforce_eager=True, logprobs_mode="processed_logprobs"
    ),
    "int4": partial(
        beside_the_cpu,
        names=["plain"],
        deterministic=True,
        quantization="int4",
        kv_cache_dtype="int8",
    ),
    "offload": partial(
        beside_the_cpu,
        names=["logprobs", "drawn"],
        deterministic=True,
        offload={"offload_group_size": 1, "offload_prefetch_step": 2},
    ),
    "offload eager": partial(
        beside_the_cpu,
        names=["plain", "logprobs"],
        enforce_eager=True,
        offload={"offload_group_size": 1, "offload_params": {"mlp.down", "qkv_proj"}},
    ),
    "codes": partial(beside_the_cpu, names=["logprobs"], deterministic=True),
    "vectors": vectors,
    "both": both,
    "memory": memory,
    "offloaded memory": partial(memory, offload_group_size=1),
}

if __name__ == "__main__":
    print(json.dumps(LIVES[sys.argv[1]](sys.argv[2])))
