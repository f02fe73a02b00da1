"""The real driver without its GPU: how it is asked for things, and what becomes of its failures."""

from __future__ import annotations

import pytest
import torch

from quire.errors import EngineDeadError
from quire.runner.devices.cuda import CudaGraphs, device_failures


def test_what_a_gpu_reports_ends_the_engine_and_other_errors_do_not():
    with pytest.raises(EngineDeadError, match="illegal memory access") as error, device_failures():
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore lines")
    assert "more lines" not in str(error.value)
    for kind in (torch.OutOfMemoryError, ValueError):
        with pytest.raises(kind), device_failures():
            raise kind("of one step")


def test_graphs_share_a_pool_and_are_captured_after_a_run_that_compiles(monkeypatch):
    calls = []

    class Graph:
        def replay(self):
            calls.append("replay")

    class Capturing:
        def __init__(self, graph, pool):
            calls.append(("capture", pool))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append("captured")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capturing)
    graphs, results = CudaGraphs(), iter(torch.arange(4.0).split(1))

    def work():
        calls.append("work")
        return next(results)

    first, second = graphs.capture(work), graphs.capture(work)
    one = ["work", "synchronize", ("capture", (7, 0)), "work", "captured"]
    assert calls == one * 2
    assert (first.result.item(), second.result.item()) == (1.0, 3.0)
    first.replay()
    assert calls[-1] == "replay"
