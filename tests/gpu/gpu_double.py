"""A GPU for tests, made of host memory: it refuses what a GPU refuses, and counts who waits for it.

Its tensors say that they are on `cuda:0` and keep their numbers in host memory that the engine
cannot reach: mixing them with tensors of the host is the error that it is on a GPU. Where the host
would wait for the device is counted, with the line of the engine that asked. Copies to pinned
memory arrive when somebody waits. What a second stream copies to the GPU arrives when the first one
waits for it, has overwritten its target before, and must have waited for what used that. A graph
keeps what was called while it was captured and calls it again with the same arguments: values of
the host are those of the capture.

`gpu_machine.install` puts it in the place of `torch.cuda`.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import quire

DEVICE = torch.device("cuda", 0)
TO, COPY, SET = torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.set_
"""As they are without the double."""

_POISON = 0xA5
_ENGINE = str(Path(quire.__file__).parent)
_READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__iter__",
    "nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "argwhere",
}  # fmt: skip
"""What needs numbers of the device on the host."""

_FORBIDDEN = {"numpy", "__array__", "__dlpack__", "share_memory_"}
_MOVES = {"to", "cpu", "cuda", "pin_memory"}
_INDEXED = {"__getitem__", "__setitem__", "index_put_", "index_put"}


class GpuTensor(torch.Tensor):
    """A tensor on the double; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=DEVICE,
        )  # fmt: skip
        made.host = host
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return Gpu.here.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} went past the double")


class Gpu:
    """The process's double, and what was done to it.

    waits: by reason and line of the engine. variants: for what kernels would have been compiled.
    """

    here: Gpu

    def __init__(self, total_bytes):
        self.total_bytes = total_bytes
        self.waits = Counter()
        self.variants = set()
        self.graphs = []
        self.recording = None
        self.first = self.stream = Stream(self)
        self.streams = []
        self.clock = 0
        self._used = {}
        self._live = {}
        self._pinned = {}
        self._coming = []

    def wrap(self, host):
        """The tensor on the double whose numbers are in `host`."""
        made = GpuTensor(host)
        key = id(made)
        self._live[key] = weakref.ref(made, lambda _: self._live.pop(key, None))
        return made

    def call(self, func, args, kwargs):
        """A function of torch with tensors of the double among its arguments."""
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if name == "is_pinned":
            return False
        if name in _MOVES:
            return self.move(name, args, kwargs)
        if name == "copy_":
            return self.copy(*args, **kwargs)
        assert name not in _FORBIDDEN, f"{name}() of memory of the GPU"
        if name in _READS:
            self.wait(name)
        if name in _INDEXED:
            self._check_index(args[1])
        else:
            _check_together(name, tree_leaves((args, kwargs)))
        where = torch.device(kwargs.get("device") or DEVICE)
        if "device" in kwargs:
            kwargs = kwargs | {"device": None}
        return self.run(func, args, kwargs, is_here=where.type == "cpu")

    def run(self, func, args, kwargs, *, is_here=False):
        """Call it on the memory behind its tensors; `is_here`: what it returns is the host's."""
        self.note_use((args, kwargs))
        owners = {id(leaf.host): leaf for leaf in tree_leaves((args, kwargs)) if is_gpu(leaf)}
        args, kwargs = tree_map(host_of, args), tree_map(host_of, kwargs)
        result = func(*args, **kwargs)
        if self.recording is not None:
            self.recording.add(func, args, kwargs, result)
        if is_here or isinstance(result, (torch.Size, str)):
            return result

        def on_the_gpu(value):
            if not isinstance(value, Tensor):
                return value
            return owners[id(value)] if id(value) in owners else self.wrap(value)

        return tree_map(on_the_gpu, result)

    def move(self, name, args, kwargs):
        """`to`, `cpu`, `cuda`: between the host and the double the host waits."""
        tensor, wanted = args[0], device_asked(name, args[1:], kwargs)
        rest = (
            [a for a in args[1:] if not isinstance(a, (torch.device, str))] if name == "to" else []
        )
        rest = [a.dtype if isinstance(a, Tensor) else a for a in rest]
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        if wanted is None or wanted.type == tensor.device.type:
            return tensor if name != "to" else self.run(TO, (tensor, *rest), kwargs)
        self.wait(f"a move to {wanted.type}")
        moved = TO(host_of(tensor), *rest, **kwargs | {"copy": True})
        return self.wrap(moved) if wanted.type == "cuda" else moved

    def copy(self, target, source, non_blocking=False):
        """`copy_`: the host goes on only if it asks to and its memory is pinned."""
        if self.stream is not self.first:
            return self._copy_aside(target, source, non_blocking)
        if is_gpu(target) == is_gpu(source):
            return self.run(COPY, (target, source), {})
        self.note_use((target, source))
        to, of = host_of(target), host_of(source)
        if not (non_blocking and self.is_pinned(source if is_gpu(target) else target)):
            self.wait("copy_")
        self._must_not_capture("copy_")
        if is_gpu(target):
            COPY(to, of)
        else:
            assert to.is_contiguous() and of.is_contiguous() and to.dtype == of.dtype
            self._coming.append((to, of.clone()))
            to.view(-1).view(torch.uint8).fill_(_POISON)
            if not non_blocking:
                self.deliver()
        return target

    def _copy_aside(self, target, source, non_blocking):
        """On a second stream: only from pinned memory to that of the GPU."""
        stream, to = self.stream, host_of(target)
        assert is_gpu(target) and self.is_pinned(source) and non_blocking
        if stream.capture is not self.recording:
            raise RuntimeError("a stream that is not a part of the capture")
        used = self._used.get(to.untyped_storage()._cdata, 0)
        if used > stream.seen:
            raise AssertionError("a copy overwrites what another stream may still read")
        self._note(_poison, to)
        stream.copies.append((to, source))
        return target

    def arrive(self, to, source):
        """What a second stream has copied is there."""
        self._note(COPY, to, source)

    def open_stream(self, *_):
        """A second stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def _note(self, func, *args):
        func(*args)
        if self.recording is not None:
            self.recording.add(func, args, {}, None)

    def note_use(self, arguments):
        """Work that is queued now uses these tensors."""
        self.clock += 1
        for leaf in tree_leaves(arguments):
            if is_gpu(leaf):
                self._used[leaf.host.untyped_storage()._cdata] = self.clock

    def wait(self, why):
        """The host waits for the device here."""
        self._must_not_capture(why)
        self.waits[f"{why}: {_line_of_the_engine()}"] += 1
        self.deliver()

    @torch.inference_mode()
    def deliver(self):
        """What was on its way to the host arrives."""
        coming, self._coming = self._coming, []
        for target, values in coming:
            COPY(target, values)

    def pinned(self, host):
        """Make memory of the host pinned, for good."""
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host):
        """Whether memory of the host is."""
        return host.untyped_storage().data_ptr() in self._pinned

    def used_bytes(self):
        """Of the tensors that somebody holds."""
        tensors = [reference() for reference in list(self._live.values())]
        storages = [t.host.untyped_storage() for t in tensors if t is not None]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def _attribute(self, func, args):
        what = func.__self__.__name__
        known = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
        return known[what] if what in known else self.run(func, args, {})

    def _check_index(self, index):
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, (list, range, np.ndarray)):
                self.wait("an index of numbers of the host")
            elif isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                self.wait("an index of booleans")
            elif isinstance(part, Tensor) and not is_gpu(part) and part.dim():
                self.wait("an index on the host")

    def _must_not_capture(self, what):
        if self.recording is not None:
            raise RuntimeError(f"{what}: not permitted while a stream is captured")


class Stream:
    """A stream; `copies` of a second one are under way. seen: the work of the first stream that it
    has waited for. capture: the graph that it is captured in.
    """

    def __init__(self, gpu):
        self.gpu, self.seen, self.capture, self.copies = gpu, 0, None, []

    def wait_stream(self, other):
        """Of a second stream for the first one."""
        assert other is self.gpu.first and self is not other
        self.seen, self.capture = self.gpu.clock, self.gpu.recording

    def wait_event(self, event):
        """Of the first stream for copies of a second one."""
        assert self is self.gpu.first and event.stream is not self
        if event.capture is not self.gpu.recording:
            raise RuntimeError("an event from outside of the capture, or from within one")
        done = {id(copy) for copy in event.copies}
        under_way, event.stream.copies = event.stream.copies, []
        for copy in under_way:
            if id(copy) in done:
                self.gpu.arrive(*copy)
            else:
                event.stream.copies.append(copy)


class Recording:
    """A captured graph."""

    def __init__(self):
        self.num_replays = 0
        self._calls = []

    def add(self, func, args, kwargs, result):
        """A call with tensors in it, and what it returned then."""
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs, result))):
            self._calls.append((func, args, kwargs, result))

    @torch.inference_mode()
    def replay(self):
        """Call everything again; what is returned goes where it was."""
        self.num_replays += 1
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and not _is_same_memory(old, new):
                    COPY(old, new)


def _poison(to):
    to.view(-1).view(torch.uint8).fill_(_POISON)


def is_gpu(value):
    """Whether it is a tensor of the double."""
    return isinstance(value, GpuTensor)


def host_of(value):
    """What the double computes with."""
    return value.host if is_gpu(value) else value


def device_asked(name, args, kwargs):
    """Where a call of `to` and the like wants its tensor; None if it does not say."""
    if name in ("cpu", "cuda"):
        return torch.device(name)
    for value in (*args, kwargs.get("device")):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (torch.device, str)):
            return torch.device(value)
    return None


def _check_together(name, leaves):
    if any(isinstance(leaf, Tensor) and not is_gpu(leaf) and leaf.dim() for leaf in leaves):
        raise RuntimeError(f"{name}: tensors are on different devices, cuda:0 and cpu")


def _is_same_memory(a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _line_of_the_engine():
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_ENGINE):
            return f"{frame.filename[len(_ENGINE) + 1 :]}: {frame.line}"
    return "a test"
