"""The runtime of one engine's native ops: threads, an instruction set, and where calls go."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidParameter
from quire.hardware import weight_file
from quire.hardware.caches import victim_cache_bytes
from quire.hardware.native import find_native
from quire.kernels.cpu.program import Program

logger = logging.getLogger(__name__)

_STREAMED = 4
"""Weights of so many times the last cache are read from memory in every step, even where several
groups of cores have such a cache each.
"""


class CpuRuntime:
    """A pool of threads and the kernels of one level; several may exist side by side.

    Ops compute at once, unless a `Program` is recording: then their calls go into it, nothing is
    computed, and their results are memory of the program. One thread at a time may use a runtime;
    its threads end with it.
    """

    def __init__(
        self, *, num_threads: int = 1, isa: str | None = None, weights_folder: Path | None = None
    ) -> None:
        """num_threads: threads that compute, the calling one included. isa: a level's name; None is
        the best one that this machine runs. weights_folder: where packed weights are kept in files;
        None: in memory.

        Raises InvalidParameter for a level that is not usable, ImportError without native code.
        """
        native, reason = find_native()
        if native is None:
            raise ImportError(reason)
        self.native = native
        self.types = {
            torch.float32: native.Type.f32,
            torch.bfloat16: native.Type.bf16,
            torch.float16: native.Type.f16,
        }
        self._weights_folder = weights_folder
        self.pool = native.Pool(num_threads)
        try:
            self.context = native.Context(self.pool, isa or native.best_level())
        except ValueError as error:
            raise InvalidParameter("QUIRE_CPU_ISA", isa, str(error), "Leave it out.") from None
        self._single: Any = None
        self.program: Program | None = None
        self._given: list[Tensor] = []
        self._place: Tensor | None = None
        self._found: list[bool] | None = None
        """Whether there was NaN, by packing; None: nobody asks."""

    @property
    def isa(self) -> str:
        """The level whose kernels run."""
        return str(self.context.level)

    @property
    def single(self) -> Any:
        """A context that computes in the calling thread alone."""
        if self._single is None:
            self._single = self.native.Context(self.native.Pool(1), self.isa)
        return self._single

    @property
    def num_threads(self) -> int:
        return int(self.pool.size)

    @contextmanager
    def record_into(self, program: Program) -> Iterator[None]:
        """Send the calls of ops into `program` while the block runs."""
        assert self.program is None, "a program is being recorded already"
        self.program = program
        self.context.begin(program.native)
        try:
            yield
        finally:
            self.context.end()
            self.program = None

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for an op's result [T, ...]; contents are arbitrary."""
        if self._place is not None and self._place.shape == shape:
            place, self._place = self._place, None
            assert place.dtype is dtype
            return place
        if self.program is None:
            return torch.empty(shape, dtype=dtype)
        return self.program.output(shape, dtype)

    @contextmanager
    def result_in(self, place: Tensor) -> Iterator[None]:
        """Have the product in the block write its result into `place` [T, out], whose rows may lie
        apart.
        """
        self._place = place
        try:
            yield
            assert self._place is None, "no op has had a result of this shape"
        finally:
            self._place = None

    def weight_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed memory for a packed weight, or what it may replace. Raises MemoryError, or
        LoadError for a full disk.
        """
        if self._given and (self._given[0].shape, self._given[0].dtype) == (shape, dtype):
            return self._given.pop(0)
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._weights_folder is None or num_bytes < weight_file.LEAST_BYTES:
            return huge_tensor(shape, dtype)
        pages = weight_file.file_pages(self._weights_folder, num_bytes)
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    @contextmanager
    def weights_replace(self, memories: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
        """Have weights that are packed meanwhile, in this order, replace those in `memories`, where
        they have the same form. Gives a function: whether some were packed by `pack`, and none of
        them has NaN.
        """
        found = self._found = []
        self._given = list(memories)
        try:
            yield lambda: bool(found) and not any(found)
        finally:
            self._given, self._found = [], None

    def pack(self, *args: Any) -> None:
        """Pack rows of a weight; `args` are those of the native call."""
        has_nan = self.context.pack(*args, self._found is not None)
        if self._found is not None:
            self._found.append(has_nan)

    def expect_weights(self, num_bytes: int) -> None:
        """Say how large the weights are that each step of the next program reads. The products of
        single rows read those that would not stay in the caches as one stream for each thread, on
        processors where that was seen to help.
        """
        self.context.streams_weights = num_bytes > _STREAMED * victim_cache_bytes() > 0

    def output_like(self, x: Tensor) -> Tensor:
        """Memory for a result of x's shape and dtype, rows side by side."""
        if self.program is None and x.is_contiguous():
            return torch.empty_like(x)  # in a third of the time
        return self.output(x.shape, x.dtype)

    def dense(self, x: Tensor) -> Tensor:
        """x with neighbours side by side along its last axis, which is what kernels read."""
        if x.stride()[-1] == 1 or x.shape[-1] == 1:
            return x
        assert self.program is None, "a copy of a strided tensor cannot be recorded"
        return x.contiguous()

    def keep(self, num_tokens: int, *tensors: Tensor | None) -> None:
        """Have a recording program keep what a call reads; does nothing without one.

        num_tokens: the T of the call, which is baked into nothing and must be the capacity.
        """
        if self.program is not None:
            self.program.keep(num_tokens, *tensors)


class NativeOps:
    """Native bodies of ops on a runtime."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self._runtime = runtime
        self._native = runtime.native
        self._context = runtime.context
        self._types = runtime.types


def open_runtime(
    *, num_threads: int, isa: str | None = None, weights_folder: Path | None = None
) -> CpuRuntime | None:
    """A runtime for an engine; None without native code, which is logged as one warning. The
    arguments are those of `CpuRuntime`.

    Raises InvalidParameter for a level that is not usable.
    """
    native, reason = find_native()
    if native is None:
        if isa is not None:
            raise InvalidParameter("QUIRE_CPU_ISA", isa, reason, "Leave it out.")
        logger.warning("Falling back to plain torch, which is several times slower: %s.", reason)
        return None
    return CpuRuntime(num_threads=num_threads, isa=isa, weights_folder=weights_folder)


def describe_native(isa: str | None = None) -> list[tuple[str, str]]:
    """(subject, finding) lines about the native code, for `quire doctor`; `isa` is one that is
    forced. Raises InvalidParameter for one that is not usable.
    """
    native, reason = find_native()
    if native is None:
        return [("native code", reason)]
    levels = native.levels()
    chosen = CpuRuntime(isa=isa).isa
    lines = [
        ("native code", f"compiled for {', '.join(name for name, _ in levels)}"),
        ("instruction set", chosen if isa is None else f"{chosen}, forced by QUIRE_CPU_ISA"),
    ]
    refused = [(name, why) for name, why in levels if why]
    return lines + [(f"not {name}", why) for name, why in refused[:1]]


def huge_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, *, touches_start: bool = False
) -> Tensor:
    """A zeroed tensor on huge pages where it is 2 MiB or more and the kernel has them.

    For weights in memory and for KV memory. Pages take no memory until they are touched;
    touches_start: a thread touches the first. Falls back to plain torch without native code. Raises
    MemoryError.
    """
    native, _ = find_native()
    count = math.prod(shape)
    if native is None or count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = native.allocate(count * dtype.itemsize, touches_start)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
