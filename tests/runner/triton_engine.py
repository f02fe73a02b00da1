"""A whole engine for a GPU, put together as on one, for test_triton_engine.

What stands in: for the GPU a late device on the CPU, for CUDA graphs recorded work, and Triton runs
in its interpreter. Run in a process of its own with TRITON_INTERPRET=1, on a model folder; prints
JSON: the tokens of a few requests, how many steps replayed a graph, and the size of the KV cache.
"""

from __future__ import annotations

import json
import sys

from quire import EngineArgs, SamplingParams
from quire.config.planning import gather_model_facts
from quire.config.resolve.resolve import resolve
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.executor import platform
from quire.hardware.facts import GpuFacts, MachineFacts
from quire.ops import select
from tests.runner.late_engines import WISHES
from tests.support.late_driver import LateDriver
from tests.support.recorded_graphs import Recorded

NUM_BLOCKS = 9
SMALL = WISHES | {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 16}
PROMPTS = ([20, 21, 22, 23, 24], [30], [20, 21, 22, 23, 24, 25, 26])
EDITED = {
    "temperature": 0.0, "repetition_penalty": 1.6, "frequency_penalty": 0.4,
    "logit_bias": {33: 0.5, 34: -0.5}, "allowed_token_ids": list(range(20, 90)),
}  # fmt: skip
GIB = 1 << 30


def requests():
    kinds = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 9}, EDITED)
    for handle, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True)):
        params = SamplingParams(max_tokens=4, ignore_eos=True, **kind)
        yield EngineCoreRequest(handle, prompt, params, seed=handle, arrival_time=0.0)


def drain(core):
    tokens = {}
    for request in requests():
        core.add_request(request)
    while core.has_work:
        out = core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
    core.shutdown()
    return [tokens[handle] for handle in sorted(tokens)]


class Graphs:
    """Recorded work; `captured` is everything that was ever captured."""

    captured = []

    def capture(self, work):
        self.captured.append(Recorded(work))
        return self.captured[-1]


class Gpu(LateDriver):
    """9 GiB are free; when somebody asks again, what the share leaves is room for NUM_BLOCKS."""

    def __init__(self):
        super().__init__(1)
        self.answers = iter((9 * GIB, 9 * GIB - int(0.9 * 9 * GIB) + NUM_BLOCKS * self.block_bytes))

    def free_bytes(self):
        return next(self.answers)


def machine():
    gpu = GpuFacts("GPU", (9, 0), 132, 10 * GIB, 9 * GIB)
    return MachineFacts(
        cpu_name="CPU", num_cpus=2, num_cores=2, features=(), total_memory_bytes=GIB,
        free_memory_bytes=GIB, gpu=gpu, torch_cuda="13.0",
    )  # fmt: skip


def interpreted(*, device, **facts):
    assert device == "cuda"
    return select(device="cpu", providers=["triton"], **facts)


def main(folder):
    args = EngineArgs(model=folder, skip_tokenizer_init=True, deterministic=True, **SMALL)
    plan = resolve(args, gather_model_facts(args), machine())
    assert plan.parallel.device == "cuda" and plan.steps.max_steps_in_flight == 2
    Gpu.block_bytes = plan.memory.kv_cache_bytes // plan.memory.num_blocks
    platform.CudaDriver, platform.CudaGraphs, platform.select = Gpu, Graphs, interpreted
    core = build_core(plan)
    num_blocks = core.scheduler.config.num_blocks
    tokens = drain(core)
    replays = sum(captured.num_replays for captured in Graphs.captured)
    sizes = [len(captured.result.last) for captured in Graphs.captured]
    found = {"tokens": tokens, "replays": replays, "num_blocks": num_blocks, "sizes": sizes}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
