"""Time on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_CALLS = 20
_CACHE_BYTES = 256 << 20
"""More than any GPU's second-level cache: written before each call, so that nothing is in it."""

_WRITES = 8
"""Of so many bytes before each call: more than half a millisecond, in which the host queues it."""


def median_seconds(call: Callable[[], object], calls: int = _CALLS) -> float:
    """Of one call with a cold cache, launches hidden behind the writes that empty it."""
    call()
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_WRITES):
            cache.zero_()
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def busy_share(intervals: list[tuple[float, float]], least_gap: float = 0.0) -> float:
    """How much of the time from the first begin to the last end some interval covers; gaps shorter
    than `least_gap` count as covered.
    """
    if not intervals:
        return 0.0
    intervals = sorted(intervals)
    start = reach = intervals[0][0]
    idle = 0.0
    for begin, end in intervals:
        gap = begin - reach
        idle += gap if gap > 0 and gap >= least_gap else 0.0
        reach = max(reach, end)
    return 1 - idle / (reach - start)
