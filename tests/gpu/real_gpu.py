"""The GPU of this machine behind the interface of the double, for lives that run on a device.

`install` counts what the double counts: kernels that are compiled, operations that make the host
wait for the device (torch's sync debug mode), replays of graphs, and memory in use.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from types import SimpleNamespace

import torch
import triton

_WAIT = "called a synchronizing CUDA operation"


class RealGpu:
    """Counts since `install`; `graphs` have `num_replays`, as those of the double."""

    def __init__(self):
        self.variants = set()
        self.waits = Counter()
        self.graphs = []
        self.total_bytes = torch.cuda.mem_get_info()[1]

    def used_bytes(self):
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


def install():
    """Watch the GPU of this process from now on."""
    gpu = RealGpu()
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("warn")
    warnings.simplefilter("always")
    show = warnings.showwarning

    def note(message, *args, **kwargs):
        if _WAIT in str(message):
            gpu.waits[_caller()] += 1
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = note
    triton.knobs.runtime.jit_post_compile_hook = lambda *, key, fn, **_: gpu.variants.add(
        (fn.name, key)
    )
    torch.cuda.CUDAGraph = _counted(torch.cuda.CUDAGraph, gpu)
    return gpu


def _caller():
    """Where in this project the host waits: file and line."""
    ours = [f for f in traceback.extract_stack()[:-2] if "/quire/" in f.filename]
    return f"{ours[-1].filename.split('/quire/')[-1]}:{ours[-1].lineno}" if ours else "elsewhere"


def _counted(graph_type, gpu):
    class Counted(graph_type):
        def __new__(cls, *args, **kwargs):
            graph = super().__new__(cls, *args, **kwargs)
            graph.count = SimpleNamespace(num_replays=0)
            gpu.graphs.append(graph.count)
            return graph

        def replay(self):
            self.count.num_replays += 1
            super().replay()

    return Counted
