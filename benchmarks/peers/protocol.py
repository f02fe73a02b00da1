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

Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float | None]]
"""Prompts as token ids, and how many tokens to generate for each, greedily -> the new ids, and the
seconds from the first token of one prompt to its last, where the engine tells them.
"""


def serve(open_engine: Callable[[dict[str, Any]], Generate]) -> None:
    """Open the engine that the request in argv[1] describes, run its workloads, write the answer.

    Two tokens after a short prompt come before every clock, so that no figure has first-time costs
    in it. The answer is written anew after each workload: who ends us early
    keeps what was done.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    generate = open_engine(request)
    answer: dict[str, Any] = {"ready_s": time.perf_counter() - start, "workloads": {}}
    for name, wanted in request["workloads"].items():
        generate([wanted["prompts"][0][:64]], 2)
        answer["workloads"][name] = _measured(generate, wanted)
        Path(request["answer"]).write_text(json.dumps(answer))
        work = answer["workloads"][name]
        print(name, work["elapsed_s"], work["decode_s"], file=sys.stderr, flush=True)


def _measured(generate: Generate, work: dict[str, Any]) -> dict[str, Any]:
    prompts, length = work["prompts"], work["output_len"]
    seconds, decoding, outputs = [], [], []
    for _ in range(work["repeats"]):
        start = time.perf_counter()
        outputs, decode_s = generate(prompts, length)
        seconds.append(time.perf_counter() - start)
        if decode_s is not None and len(prompts) == 1:
            decoding.append(decode_s)
    assert [len(ids) for ids in outputs] == [length] * len(prompts), "other lengths than asked for"
    return {"elapsed_s": seconds, "decode_s": decoding, "outputs": outputs}
