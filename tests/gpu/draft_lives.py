"""Drafts on the double, for test_gpu_double: the same bits with and without. Prints JSON."""

from __future__ import annotations

import json
import sys

from tests.gpu.gpu_machine import install

gpu = install()

from quire import LLM, SamplingParams  # noqa: E402
from tests.gpu.gpu_lives import PROMPTS, SETTINGS, greedy  # noqa: E402

KINDS = [
    greedy(max_tokens=6, logprobs=1),
    greedy(max_tokens=7, temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=1.0, seed=2, max_tokens=8, ignore_eos=True, bad_words=["a"]),
]


def bits(llm):
    """Ids and log-probabilities of a request of each kind."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = []
    for output in llm.generate(prompts, KINDS, use_tqdm=False):
        found += [[list(c.token_ids), c.finish_reason, columns(c.logprobs)] for c in output.outputs]
    return found


def columns(entries):
    return [[(i, v.logprob, v.rank) for i, v in sorted(e.items())] for e in entries or () if e]


def main(folder, config):
    settings = SETTINGS | {"num_gpu_blocks_override": 12, "deterministic": True, "device": "cuda"}
    settings |= {"max_model_len": 24}
    with LLM(folder, **settings) as llm:
        right = bits(llm)
    with LLM(folder, **settings, speculative_config=config, disable_log_stats=False) as llm:
        known = set(gpu.variants)
        gpu.waits.clear()
        found = bits(llm)
        waits, compiled = dict(gpu.waits), sorted({v[0] for v in gpu.variants - known})
        values = {m.name: m for m in llm.get_metrics()}
    counts = {n: values[f"vllm:spec_decode_num_{n}_tokens"].value for n in ("draft", "accepted")}
    return {
        "found": found, "right": right, "waits": waits, "compiled": compiled,
        "drafted": counts["draft"], "accepted": counts["accepted"],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
