"""Metrics as values (`Counter`, `Gauge`, `Histogram`) and the buckets that a histogram fills.

Names are bare; whoever shows them says with which prefix. Nothing here knows Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec


class Counter(msgspec.Struct, frozen=True, tag=True):
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


class Gauge(msgspec.Struct, frozen=True, tag=True):
    """A number as it is now."""

    name: str
    labels: dict[str, str]
    value: float


class Histogram(msgspec.Struct, frozen=True, tag=True):
    """How many values were at most as large as each bound (a float as text, "+Inf" the last)."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric = Counter | Gauge | Histogram


class Buckets:
    """Counts values by size. `bounds` grow; a value equal to a bound belongs to it."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """The counts as they are now."""
        totals = list(accumulate(self._counts))
        texts = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(texts, totals, strict=True)))


def sizes_up_to(most: int) -> list[int]:
    """Bounds 1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds = []
    power = 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return bounds
