"""Metrics as values, independent of Prometheus. Their names have no prefix."""

from __future__ import annotations

import msgspec


class Counter(msgspec.Struct, frozen=True, tag=True):
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


class Vector(msgspec.Struct, frozen=True, tag=True):
    """Counters by their position in a list, which is a label of each in Prometheus."""

    name: str
    labels: dict[str, str]
    values: list[int]


class Gauge(msgspec.Struct, frozen=True, tag=True):
    """A number as it is now."""

    name: str
    labels: dict[str, str]
    value: float


class Histogram(msgspec.Struct, frozen=True, tag=True):
    """Counts of values at most as large as each bound (a float as text, "+Inf" the last)."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric = Counter | Vector | Gauge | Histogram
