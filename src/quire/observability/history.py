"""The course of an engine's metrics over the last hour, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from quire.observability.metrics import Counter, Gauge, Histogram, Metric

PERIOD_S = 5.0
KEPT_S = 3600.0

_GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_cache": "kv_cache_usage_perc",
}
_RATES = {
    "generated_rate": "generation_tokens",
    "prompt_rate": "prompt_tokens",
    "request_rate": "request_success",
}
_QUANTILES = {
    "first_token": "time_to_first_token_seconds",
    "token_gap": "inter_token_latency_seconds",
    "latency": "e2e_request_latency_seconds",
}
_QUEUE_TIME = "request_queue_time_seconds"
_SIGNIFICANT = 5


class Course(msgspec.Struct, kw_only=True):
    """Values by name at `times` (seconds of the wall clock, every `period_s`), the oldest first.

    None where nothing happened that the value is of: `first_token`, `token_gap` and `latency` are
    quantiles of what ended in the period, in seconds, interpolated between the bounds of buckets,
    `queue_mean` is a mean; `_rate` is for each second, `prefix_hits` a share, `_bytes` memory.
    """

    period_s: float
    kept_s: float
    times: list[float]
    series: dict[str, list[float | None]]


@dataclass(slots=True)
class _Totals:
    """Metrics at one time, summed over all labels."""

    at: float
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, dict[float, int]] = field(default_factory=dict)


class MetricsHistory:
    """Keeps one sample for each period."""

    def __init__(self, period_s: float = PERIOD_S, kept_s: float = KEPT_S) -> None:
        self.period_s, self._kept_s = period_s, kept_s
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=int(kept_s / period_s))
        self._before: _Totals | None = None

    def add(self, at: float, metrics: Iterable[Metric], memory: Mapping[str, float]) -> None:
        """Take a sample at the time `at`: the metrics, and memory in bytes by name."""
        now = _summed(at, metrics)
        sample = {name: now.values[of] for name, of in _GAUGES.items() if of in now.values}
        # the wall clock may have been set back
        if self._before is not None and at > self._before.at:
            sample |= _changes(self._before, now)
        self._before = now
        sample |= memory
        self._samples.append((at, sample))

    def since(self, at: float) -> Course:
        """The samples after the time `at`."""
        samples = [(time, sample) for time, sample in self._samples if time > at]
        names = dict.fromkeys(name for _, sample in samples for name in sample)
        series: dict[str, list[float | None]] = {
            name: [_rounded(sample.get(name)) for _, sample in samples] for name in names
        }
        times = [round(time, 3) for time, _ in samples]
        return Course(period_s=self.period_s, kept_s=self._kept_s, times=times, series=series)


def _summed(at: float, metrics: Iterable[Metric]) -> _Totals:
    totals = _Totals(at)
    for metric in metrics:
        name = metric.name.rpartition(":")[2]
        if isinstance(metric, Gauge | Counter):
            totals.values[name] = totals.values.get(name, 0.0) + metric.value
        elif isinstance(metric, Histogram):
            totals.values[name] = totals.values.get(name, 0.0) + metric.sum
            totals.counts[name] = totals.counts.get(name, 0) + metric.count
            buckets = totals.buckets.setdefault(name, {})
            for bound, count in metric.buckets.items():
                buckets[float(bound)] = buckets.get(float(bound), 0) + count
    return totals


def _changes(before: _Totals, now: _Totals) -> dict[str, float]:
    """Differences between two samples; a total that has become smaller counts for nothing."""

    def change(name: str) -> float:
        return max(0.0, now.values.get(name, 0.0) - before.values.get(name, 0.0))

    sample = {name: change(of) / (now.at - before.at) for name, of in _RATES.items()}
    if queries := change("prefix_cache_queries"):
        sample["prefix_hits"] = change("prefix_cache_hits") / queries
    num_queued = now.counts.get(_QUEUE_TIME, 0) - before.counts.get(_QUEUE_TIME, 0)
    if num_queued > 0:
        sample["queue_mean"] = change(_QUEUE_TIME) / num_queued
    for name, of in _QUANTILES.items():
        counts = _bucket_changes(before.buckets.get(of, {}), now.buckets.get(of, {}))
        if counts and counts[-1][1] > 0:
            sample[f"{name}_p50"] = quantile(counts, 0.5)
            sample[f"{name}_p95"] = quantile(counts, 0.95)
    return sample


def _bucket_changes(
    before: Mapping[float, int], now: Mapping[float, int]
) -> list[tuple[float, int]]:
    return [(bound, now[bound] - before.get(bound, 0)) for bound in sorted(now)]


def quantile(counts: list[tuple[float, int]], share: float) -> float:
    """The value below which `share` of all lie. `counts`: how many are at most as large as each
    bound, in rising order, at least one of them; the last bound may be infinite.
    """
    wanted = share * counts[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0), *counts]):
        if upto >= wanted and upto > below:
            # nothing to interpolate to: the last finite bound is the best that is known
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (upto - below)
    return counts[-1][0]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_SIGNIFICANT}g}")
