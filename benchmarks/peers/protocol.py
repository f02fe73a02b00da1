"""How compare.py speaks with the engines: a request in one JSON file, the answer in another.

Only the standard library, because each engine has an interpreter of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts as token ids, and how many tokens to generate for each, greedily -> the new ids."""


def serve(open_engine: Callable[[dict[str, Any]], Generate]) -> None:
    """Open the engine that the request in argv[1] describes, run its workloads, write the answer.

    Every workload runs once before its clock starts, with two tokens per prompt, so that no figure
    has first-time costs in it. The answer is written anew after each workload: who ends us early
    keeps what was done.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    generate = open_engine(request)
    answer: dict[str, Any] = {"ready_s": time.perf_counter() - start, "workloads": {}}
    for name, work in request["workloads"].items():
        generate(work["prompts"][:1], 2)
        answer["workloads"][name] = _measured(generate, work)
        Path(request["answer"]).write_text(json.dumps(answer))
        print(name, answer["workloads"][name]["elapsed_s"], file=sys.stderr, flush=True)


def _measured(generate: Generate, work: dict[str, Any]) -> dict[str, Any]:
    prompts, length = work["prompts"], work["output_len"]
    seconds, outputs = [], []
    for _ in range(work["repeats"]):
        start = time.perf_counter()
        outputs = generate(prompts, length)
        seconds.append(time.perf_counter() - start)
    assert [len(ids) for ids in outputs] == [length] * len(prompts), "other lengths than asked for"
    return {"elapsed_s": seconds, "outputs": outputs}
