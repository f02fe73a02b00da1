"""The program of a process that a launcher starts: an engine of the embedded model with text,
grammars and a reload of weights, compared with one of a single worker.

    torchrun --nproc-per-node 2 -m tests.executor.ranks.launched_run [TP [PP]]

Prints the ids of each process; exits with 1 where they are not those of one worker.
"""

from __future__ import annotations

import os
import sys

from quire import LLM, SamplingParams, StructuredOutputsParams

SETTINGS = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 60}
FORM = StructuredOutputsParams(regex="[a-f]{3,9}!")
ASKED = [
    ("The first thing", SamplingParams(max_tokens=12, temperature=0.0)),
    ("A second", SamplingParams(max_tokens=12, temperature=0.9, seed=7)),
    ("Then", SamplingParams(max_tokens=12, temperature=0.7, seed=3, structured_outputs=FORM)),
]


def answers(llm: LLM) -> list[list[int]]:
    prompts, params = zip(*ASKED, strict=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(list(prompts), list(params))]


def main() -> int:
    tp, pp = (int(word) for word in (*sys.argv[1:3], "2", "1")[:2]) if sys.argv[1:] else (2, 1)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    llm = LLM(distributed_executor_backend="external_launcher", **sizes, **SETTINGS)
    found = answers(llm)
    llm.collective_rpc("reload_weights")
    again = answers(llm)
    del llm
    right = answers(LLM(**SETTINGS))
    print(f"process {os.environ['RANK']}: {found}", flush=True)
    return 0 if found == again == right else 1


if __name__ == "__main__":
    sys.exit(main())
