"""Counts of values by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from quire.observability.metrics import Histogram


class Buckets:
    """Counts values by size. `bounds` grow; a value equal to a bound belongs to it."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """The counts as they are now."""
        totals = list(accumulate(self._counts))
        texts = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(texts, totals, strict=True)))
