"""The program of a process that a launcher starts: an engine of the embedded model with text,
several completions, grammars and a reload of weights, compared with one of a single worker.

    torchrun --nproc-per-node 2 -m tests.executor.ranks.launched_run [TP [PP [ahead]]]

`ahead`: with async_scheduling.

Prints the ids of each process; exits with 1 where they are not those of one worker.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 14}
"""Too few blocks for all at once: some are preempted."""
FORM = StructuredOutputsParams(regex="[a-f]{3,9}!")
ASKED = [
    ("The first thing", SamplingParams(max_tokens=12, temperature=0.0)),
    ("A second", SamplingParams(max_tokens=12, temperature=0.9, seed=7)),
    ("Then", SamplingParams(max_tokens=12, temperature=0.7, seed=3, structured_outputs=FORM)),
    ("So", SamplingParams(n=3, max_tokens=12, temperature=0.9, seed=4, structured_outputs=FORM)),
    ("In the end", SamplingParams(n=4, max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)),
]


def answers(llm: LLM) -> list[list[int]]:
    prompts, params = zip(*ASKED, strict=True)
    found = llm.generate(list(prompts), list(params))
    return [list(each.token_ids) for output in found for each in output.outputs]


def main() -> int:
    given = sys.argv[1:]
    tp, pp = (int(given[n]) if n < len(given) else default for n, default in enumerate((2, 1)))
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    if "ahead" in given:
        sizes["async_scheduling"] = True
    llm = LLM(distributed_executor_backend="external_launcher", **sizes, **SETTINGS)
    found = answers(llm)
    llm.collective_rpc("reload_weights")
    again = answers(llm)
    lost = [each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions"]
    del llm
    right = answers(LLM(**SETTINGS))
    print(f"process {os.environ['RANK']}, {lost} preemptions: {found}", flush=True)
    return 0 if found == again == right else 1


if __name__ == "__main__":
    sys.exit(main())
