"""Does to the double what must not be done to a GPU, for test_gpu_double; prints what it says."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from quire.runner.devices.cuda import CudaCopyQueue
from tests.gpu.gpu_machine import install

gpu = install()


@triton.jit
def _copy_kernel(source: tl.tensor, target: tl.tensor, n: int, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < n, other=0.0), at < n)


def launch(source, target, n):
    _copy_kernel[(1,)](source, target, n, BLOCK=16)


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, call()


def waits(x):
    calls = (
        lambda: x.sum().item(), lambda: x[[0, 2]], lambda: x[x > 0], lambda: x.cpu(),
        lambda: torch.zeros(3).to("cuda"), lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.zeros(8).copy_(x, non_blocking=True),
    )  # fmt: skip
    for call in calls:
        call()
    return sorted(why.split(":")[0] for why in gpu.waits)


def early_and_in_time(x):
    target = torch.empty(8, pin_memory=True)
    target.copy_(x, non_blocking=True)
    is_early = not torch.equal(target, torch.arange(8.0))
    torch.cuda.Event().synchronize()
    return is_early, torch.equal(target, torch.arange(8.0))


def new_variants(*calls):
    known = set(gpu.variants)
    for call in calls:
        call()
    return len(gpu.variants - known)


def copied_aside(x, *, waits_first=True, joins=True):
    """x after a copy of numbers to it on a second stream, and what reading it says."""
    source, stream = torch.zeros(8, pin_memory=True), torch.cuda.Stream()
    x.add_(1.0)
    if waits_first:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record(stream)
    if joins:
        torch.cuda.current_stream().wait_event(event)
    return bool((x == 0).all()), event


def asides(x):
    _, outside = copied_aside(x, joins=False)
    join = torch.cuda.current_stream().wait_event
    is_right, _ = copied_aside(x.clone())
    is_early, _ = copied_aside(x.clone(), joins=False)
    captured(lambda: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()))
    return {
        "a copy aside": is_right,
        "a copy aside that nobody waits for": is_early,
        "a copy aside that waits for nobody": error_of(
            lambda: copied_aside(x.clone(), waits_first=False)
        ),
        "a copy of before in a capture": error_of(lambda: captured(lambda: join(outside))),
    }


def copies_in_a_graph():
    """What a graph makes of copies aside: they are a part of it, and are joined within."""
    queue = CudaCopyQueue(torch.device("cuda"))
    buffer, found = torch.zeros(8, device="cuda"), torch.zeros(2, 8, device="cuda")
    sources = [torch.full((8,), 1.0 + i, pin_memory=True) for i in range(2)]

    def work():
        for i in range(2):
            queue.start([(buffer, sources[i])]).join()
            found[i].copy_(buffer)

    graph, _ = captured(work)
    sources[0].fill_(5.0)
    graph.replay()
    return {
        "replayed copies": found[:, 0].tolist(),
        "a capture that is not joined": error_of(
            lambda: captured(lambda: queue.start([(buffer, sources[0])]))
        ),
    }


def main():
    x, host = torch.arange(8.0, device="cuda"), torch.zeros(8)
    y = torch.empty_like(x)
    found = {
        "a mixture": error_of(lambda: x + host),
        "the host's memory in a kernel": error_of(lambda: launch(x, host, 8)),
        "numpy of a GPU": error_of(lambda: x.numpy()),
        "waiting while captured": error_of(lambda: captured(lambda: x.sum().item())),
        "a copy while captured": error_of(lambda: captured(lambda: x.copy_(host))),
        "waits": waits(x),
    }
    found["read too early"], found["read in time"] = early_and_in_time(x)
    seven = [7.0]
    graph, result = captured(lambda: x + seven[0])
    seven[0] = 9.0
    x.zero_()
    graph.replay()
    found["replayed with old numbers"] = result[0].item()
    launch(x, y, 8)
    found["another number"] = new_variants(
        lambda: launch(x, y, 5), lambda: launch(x, y, 5.0), lambda: launch(x, y, 6)
    )
    found["another alignment"] = new_variants(lambda: launch(x[1:], y, 5))
    found |= asides(torch.ones(8, device="cuda")) | copies_in_a_graph()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
