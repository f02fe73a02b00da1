"""A whole engine for a GPU with weights and K/V in 8-bit floats, for test_triton_engine.

As triton_engine, with greedy requests: a first round, one more that finds its prompts in the prefix
cache, and one after sleep. Prints JSON: tokens and their log-probabilities of each round, and what
the plan and the memory say.
"""

from __future__ import annotations

import json
import sys

from quire import EngineArgs, SamplingParams
from quire.config.planning import gather_model_facts
from quire.config.resolve.resolve import resolve
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.executor import platform
from tests.runner.triton_engine import PROMPTS, SMALL, Gpu, Graphs, interpreted, machine

NUM_TOKENS = 4
WISHES = SMALL | {"quantization": "fp8", "kv_cache_dtype": "fp8", "num_gpu_blocks_override": 20}
WISHES["enforce_eager"] = True


def answers(core, first_handle):
    """[tokens, log-probabilities] of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    handles = range(first_handle, first_handle + len(PROMPTS))
    found = {handle: ([], []) for handle in handles}
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        core.add_request(EngineCoreRequest(handle, prompt, params, seed=0, arrival_time=0.0))
    while core.has_work:
        out = core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            found[handle][0].append(token)
        if out.logprobs is not None:
            for m, index in enumerate(out.logprobs.index):
                found[out.handles[index]][1].append(float(out.logprobs.values[m][0]))
    return list(found.values())


def main(folder):
    args = EngineArgs(model=folder, skip_tokenizer_init=True, deterministic=True, **WISHES)
    plan = resolve(args, gather_model_facts(args), machine())
    Gpu.block_bytes = 0
    platform.CudaDriver, platform.CudaGraphs, platform.select = Gpu, Graphs, interpreted
    core = build_core(plan)
    rounds = [answers(core, 0), answers(core, 10)]
    perform(core, "sleep", (1,)).result(timeout=0)
    asleep = core.executor.worker.kv_cache_bytes()
    perform(core, "wake_up", ())
    held = core.executor.worker.kv_cache_bytes()
    rounds.append(answers(core, 20))
    core.shutdown()
    sizes = {"planned": plan.memory.kv_cache_bytes, "held": held, "asleep": asleep}
    print(json.dumps({"rounds": rounds, "sizes": sizes, "kv_dtype": plan.memory.kv_dtype}))


if __name__ == "__main__":
    main(sys.argv[1])
