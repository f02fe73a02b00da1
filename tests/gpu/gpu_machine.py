"""Makes this process one of a machine with a GPU: the double of gpu_double.

Triton's kernels run in its interpreter (TRITON_INTERPRET=1), on the memory behind the double's
tensors; a tensor of the host among their arguments is refused. There is no way back, so this is for
processes that tests start.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import GridExecutor

import quire.hardware.host
from quire.hardware.facts import GpuFacts
from tests.gpu import real_gpu
from tests.gpu.gpu_double import COPY, SET, TO, Gpu, Recording, device_asked, host_of, is_gpu

_FACTORIES = (
    "empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint",
    "eye", "linspace", "empty_like", "zeros_like", "ones_like", "full_like", "randn_like",
)  # fmt: skip
_LAUNCH = GridExecutor.__call__


REAL = "QUIRE_TEST_REAL_GPU"
"""Variable that has lives run on the GPU of this machine (tools/gpu_report.py sets it)."""


def install(total_bytes=1 << 28):
    """Put the double in the place of `torch.cuda`, and let the engine find it."""
    if os.environ.get(REAL):
        return real_gpu.install()
    Gpu.here = gpu = Gpu(total_bytes)
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.set_ = _to, _copy, _set
    torch.Tensor.cuda = lambda self, *_, **__: gpu.move("cuda", (self,), {})
    torch.Tensor.is_pinned = lambda self, *_: gpu.is_pinned(self)
    torch.Generator = _Generator
    torch.version.cuda = "13.0"
    for name, value in _cuda(gpu).items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, value)
    GridExecutor.__call__ = _launch
    facts = GpuFacts("double", (9, 0), 4, total_bytes, total_bytes)
    quire.hardware.host.find_gpu = lambda: (facts, "")
    quire.hardware.host.torch_cuda_version = lambda: torch.version.cuda
    return gpu


def _cuda(gpu):
    return {
        "is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda _: None,
        "current_device": lambda: 0, "get_device_name": lambda *_: "double",
        "get_device_capability": lambda *_: (9, 0), "empty_cache": lambda: None,
        "get_device_properties": lambda *_: SimpleNamespace(
            shared_memory_per_block_optin=227 << 10, multi_processor_count=4
        ),
        "synchronize": lambda *_: gpu.deliver(),
        "mem_get_info": lambda *_: (gpu.total_bytes - gpu.used_bytes(), gpu.total_bytes),
        "Stream": gpu.open_stream, "current_stream": lambda *_: gpu.stream,
        "stream": _OnStream, "Event": _Event, "CUDAGraph": _Graph, "graph": _Capture,
        "graph_pool_handle": lambda: (0, 1),
    }  # fmt: skip


def _factory(make):
    def made(*args, **kwargs):
        gpu = Gpu.here
        if kwargs.pop("pin_memory", False):
            return gpu.pinned(make(*args, **kwargs))
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return make(*args, **kwargs)
        if make.__name__ in ("tensor", "as_tensor"):
            gpu.wait(f"torch.{make.__name__}")
        return gpu.run(make, args, kwargs | {"device": None})

    made.__name__ = make.__name__
    return made


def _to(self, *args, **kwargs):
    wanted = device_asked("to", args, kwargs)
    if is_gpu(self) or (wanted is not None and wanted.type == "cuda"):
        return Gpu.here.move("to", (self, *args), kwargs)
    return TO(self, *args, **kwargs)


def _copy(self, source, non_blocking=False):
    if is_gpu(self) or is_gpu(source):
        return Gpu.here.copy(self, source, non_blocking)
    return COPY(self, source, non_blocking)


def _set(self, *args):
    return Gpu.here.run(SET, (self, *args), {}) if is_gpu(self) else SET(self, *args)


def _launch(self, *args, **kwargs):
    gpu = Gpu.here
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and not is_gpu(value):
            raise ValueError("a pointer to the host's memory cannot be accessed by Triton")
    gpu.variants.add(_variant(self, args, kwargs))
    gpu.note_use((args, kwargs))
    args, kwargs = tree_map(host_of, args), tree_map(host_of, kwargs)

    def launch(*args, **kwargs):  # an executor is for one launch
        _LAUNCH(GridExecutor(*given), *args, **kwargs)

    given = (self.fn, self.arg_names, self.grid, self.pre_run_hooks)
    launch(*args, **kwargs)
    if gpu.recording is not None:
        gpu.recording.add(launch, args, kwargs, None)


def _variant(launch, args, kwargs):
    """What Triton compiles a kernel for: types and alignment of pointers, types of numbers, and the
    values of everything else.
    """
    given = dict(zip(launch.arg_names, args, strict=False)) | kwargs

    def kind(name, value):
        if is_gpu(value):
            return value.dtype, value.data_ptr() % 16 == 0
        is_number = name in launch.arg_names and name not in launch.constexprs
        return type(value) if is_number else value

    return launch.fn.__name__, *((name, kind(name, value)) for name, value in sorted(given.items()))


class _Generator(torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls)


class _Event:
    def __init__(self, **_):
        pass

    def record(self, stream=None):
        self.stream = stream or Gpu.here.stream
        self.capture, self.copies = self.stream.capture, list(self.stream.copies)

    def synchronize(self):
        Gpu.here.deliver()

    def elapsed_time(self, end):
        return 1.0


class _OnStream:
    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        Gpu.here.stream = self._stream

    def __exit__(self, *_):
        Gpu.here.stream = Gpu.here.first


class _Graph:
    def __init__(self):
        self.recording = Recording()
        Gpu.here.graphs.append(self.recording)

    def replay(self):
        self.recording.replay()


class _Capture:
    def __init__(self, graph, pool=None):
        self._graph = graph

    def __enter__(self):
        Gpu.here.recording = self._graph.recording

    def __exit__(self, error, *_):
        Gpu.here.recording = None
        own = [s for s in Gpu.here.streams if s.capture is self._graph.recording]
        if error is None and any(stream.copies for stream in own):
            raise RuntimeError("a stream of the capture was not joined")
