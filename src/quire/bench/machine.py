"""The limits of the machine, measured in the process and at the moment of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

_READ_BYTES = 512 << 20
_MATRIX = 2048


class MachineLimits(msgspec.Struct, frozen=True):
    """What `num_threads` threads of torch reach: bytes read per second, operations per second in
    `dtype`.
    """

    read_bytes_per_s: float
    matrix_flops_per_s: float
    dtype: str
    num_threads: int


def measure_limits(dtype: str, num_threads: int, repeats: int = 5) -> MachineLimits:
    """Read bandwidth and matrix peak, the best of `repeats`. Takes about two seconds and 0.5 GiB.

    The thread count of torch is as before afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return MachineLimits(
            read_bytes_per_s=_READ_BYTES / _fastest(_reader(), repeats),
            matrix_flops_per_s=2 * _MATRIX**3 / _fastest(_multiplier(dtype), repeats),
            dtype=dtype,
            num_threads=num_threads,
        )
    finally:
        torch.set_num_threads(before)


def _reader() -> Callable[[], object]:
    data = torch.ones(_READ_BYTES // 4)
    return lambda: data.sum()


def _multiplier(dtype: str) -> Callable[[], object]:
    left = torch.rand(_MATRIX, _MATRIX).to(getattr(torch, dtype))
    right = torch.rand(_MATRIX, _MATRIX).to(getattr(torch, dtype))
    return lambda: left @ right


def _fastest(action: Callable[[], object], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
