"""A whole engine on Triton's interpreter behind a late device with graphs, for test_triton_engine.

Run in a process of its own with TRITON_INTERPRET=1, on a model folder; prints JSON: the tokens of a
few requests, and how many steps replayed a graph.
"""

from __future__ import annotations

import json
import sys

import torch
from late_engines import plan_of
from test_decode_graphs import Recorded

from quire import SamplingParams
from quire.engine.builder import build_core
from quire.engine.protocol import EngineCoreRequest
from quire.engine.target import Target
from quire.ops import select
from quire.runner.decode_graphs import GraphForward
from quire.runner.stream_device import StreamDevice
from quire.testing.late_driver import LateDriver

PROMPTS = ([20, 21, 22, 23, 24], [30], [20, 21, 22, 23, 24, 25, 26])
SIZES = [1, 2, 4]


def requests():
    kinds = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 9}, {"temperature": 0.0})
    for handle, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True)):
        params = SamplingParams(max_tokens=5, ignore_eos=True, **kind)
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
    def __init__(self, captured):
        self.captured = captured

    def capture(self, work):
        self.captured.append(Recorded(work))
        return self.captured[-1]


def main(folder):
    device = StreamDevice(LateDriver(1), arena_bytes=1 << 16)
    ops = select(
        device="cpu", dtype=torch.float32, providers=["triton"], runtime=device, deterministic=True
    )
    captured = []
    target = Target(
        device,
        ops,
        lambda model, batches: GraphForward(
            model, lambda: Graphs(captured), batches.padding, SIZES
        ),
        SIZES,
    )
    core = build_core(plan_of(folder, async_scheduling=True), target)
    tokens = drain(core)
    print(json.dumps({"tokens": tokens, "replays": sum(c.num_replays for c in captured)}))


if __name__ == "__main__":
    main(sys.argv[1])
