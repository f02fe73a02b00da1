"""The limits of the machine, measured in the process and around every trial of a benchmark.

Two limits that no correct engine on these threads can beat: bytes read per second from memory on
huge pages, and multiply-adds per second on registers (csrc/kernels/limits.cpp). Where torch's
matrix product is faster, as with matrix units that our kernels do not use, that is the limit: its
product in the operand's dtype, or in float32 where that one is emulated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from quire.environment import read_environment
from quire.hardware.native import find_native
from quire.kernels.cpu.runtime import CpuRuntime, huge_tensor

_READ_BYTES = 512 << 20
_SMALLEST, _LARGEST = 64, 2048
"""Rows and columns of torch's matrices."""
_BUDGET_S = 0.4
"""Seconds for the products of a dtype: an emulated one would take minutes if large."""
_TILES = 64
_ROUNDS = 20_000
"""Multiply-adds of a tile and chain: with _TILES, ten milliseconds or so for two threads."""

_OPERANDS = {"float32": "f32", "float16": "f32", "bfloat16": "bf16", "int8": "int8"}


class MachineLimits(msgspec.Struct, frozen=True):
    """Limits of `num_threads` threads: bytes and operations per second, and which loops said so."""

    read_bytes_per_s: float
    read_by: str
    flops_per_s: float
    flops_by: str
    num_threads: int


class LimitProbe:
    """Measures the limits for products of `operand` (a dtype or int8) again and again.

    Holds 0.5 GiB. The thread count of torch is as before after every call.
    """

    def __init__(self, operand: str, num_threads: int, runtime: CpuRuntime | None = None) -> None:
        """`runtime`: threads and instructions to measure with; None makes one like an engine's."""
        self._num_threads = num_threads
        self._operand = _OPERANDS[operand]
        native, _ = find_native()
        self._runtime = runtime
        if runtime is None and native is not None:
            self._runtime = CpuRuntime(num_threads=num_threads, isa=read_environment().cpu_isa)
        # filled, since pages that were never written are all the same page of zeros
        self._memory = huge_tensor((_READ_BYTES,), torch.uint8).fill_(1)
        dtype = operand if hasattr(torch, operand) and operand.startswith(("b", "f")) else "float32"
        self.torch_flops_per_s = {
            name: self._with_threads(partial(matrix_flops_per_s, name))
            for name in dict.fromkeys((dtype, "float32"))
        }

    def measure(self) -> MachineLimits:
        """The limits at this moment; takes about a tenth of a second."""
        by_torch = [(v, f"torch's {name} product") for name, v in self.torch_flops_per_s.items()]
        flops, flops_by = max(self._flops(), *by_torch)
        read, read_by = self._read()
        return MachineLimits(read, read_by, flops, flops_by, self._num_threads)

    def evict(self, runtime: CpuRuntime | None = None, num_bytes: int = 96 << 20) -> None:
        """Read so much that nothing else is left in the caches. With the threads of `runtime` they
        are awake for what comes next, as they are in the middle of a model, and no others spin.
        """
        part = self._memory[:num_bytes]
        runtime = runtime or self._runtime
        if runtime is None:
            part.view(torch.float32).sum()
            return
        pieces = max(1, part.numel() // runtime.native.read_piece)
        runtime.context.time_read(part.data_ptr(), pieces)

    def _read(self) -> tuple[float, str]:
        size = self._memory.numel()
        if self._runtime is None:
            data = self._memory.view(torch.float32)
            seconds = self._with_threads(lambda: fastest(data.sum, 3))
            return size / seconds, "torch's sum"
        piece = self._runtime.native.read_piece
        time_read = self._runtime.context.time_read
        # the best of three is the limit: other programs only make it slower
        seconds = min(time_read(self._memory.data_ptr(), size // piece) for _ in range(3))
        return size // piece * piece / seconds, f"a native loop ({self._runtime.isa})"

    def _flops(self) -> tuple[float, str]:
        if self._runtime is None:
            return 0.0, ""
        operand = self._runtime.native.Operand.__members__[self._operand]
        ways = {operand, self._runtime.native.Operand.f32}
        rates = [self._rate(way) for way in ways for _ in range(3)]
        return max(rates), f"multiply-adds on registers ({self._runtime.isa})"

    def _rate(self, operand: Any) -> float:
        assert self._runtime is not None
        operations, seconds = self._runtime.context.time_multiply_add(operand, _TILES, _ROUNDS)
        return operations / seconds

    def _with_threads(self, action: Callable[[], float]) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return action()
        finally:
            torch.set_num_threads(before)


def between(before: MachineLimits, after: MachineLimits) -> MachineLimits:
    """The limits of a trial that was measured before and after."""
    return MachineLimits(
        statistics.fmean((before.read_bytes_per_s, after.read_bytes_per_s)),
        before.read_by,
        statistics.fmean((before.flops_per_s, after.flops_per_s)),
        before.flops_by,
        before.num_threads,
    )


def matrix_flops_per_s(dtype: str) -> float:
    """Operations per second of torch's product of two square matrices, the best of three. The
    matrices grow to `_LARGEST`, or until the next size would go beyond `_BUDGET_S`.
    """
    size, spent = _SMALLEST, 0.0
    while True:
        times = product_seconds(dtype, size)
        spent += sum(times)
        # twice the size is eight times the operations
        next_s = 8 * len(times) * min(times)
        if size == _LARGEST or spent + next_s > _BUDGET_S:
            return 2 * size**3 / min(times)
        size *= 2


def product_seconds(dtype: str, size: int) -> list[float]:
    """Seconds of three products [size, size] @ [size, size] of torch; the first may be slow."""
    left, right = (torch.rand(size, size).to(getattr(torch, dtype)) for _ in range(2))
    return [seconds_of(lambda: left @ right) for _ in range(3)]


def fastest(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one that does not count."""
    action()
    return min(seconds_of(action) for _ in range(repeats))


def seconds_of(action: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
