"""Time on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_CALLS = 20
_CACHE_BYTES = 256 << 20
"""More than any GPU's second-level cache: written before each call, so that nothing is in it."""


def median_seconds(call: Callable[[], object], calls: int = _CALLS) -> float:
    """Of one call with a cold cache, launches hidden behind the write that empties it."""
    call()
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def busy_share(intervals: list[tuple[float, float]]) -> float:
    """How much of the time from the first begin to the last end some interval covers."""
    if not intervals:
        return 0.0
    intervals = sorted(intervals)
    covered, reach = 0.0, intervals[0][0]
    for begin, end in intervals:
        covered += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return covered / (reach - intervals[0][0])
