"""Metrics in the text form that Prometheus reads.

The engine keeps the totals; a scrape reads them, so nothing is kept twice. `prometheus_client` is
imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from quire.observability.metrics import Counter, Gauge, Histogram, Metric, Vector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family


class MetricsCollector:
    """A collector for any registry of `prometheus_client`; it asks `snapshot` at every scrape.

    `prefix` is put before every name ("vllm:" is what existing dashboards expect). `since` is
    the wall-clock time from which the totals count (seconds), shown as `_created`.
    """

    def __init__(
        self,
        snapshot: Callable[[], Iterable[Metric]],
        descriptions: dict[str, str],
        *,
        prefix: str,
        since: float,
    ) -> None:
        self._snapshot = snapshot
        self._descriptions = descriptions
        self._prefix = prefix
        self._since = since

    def collect(self) -> Iterator[Family]:
        """One family for each name, in the order of the snapshot."""
        from prometheus_client.core import Metric as Family

        families: dict[str, Family] = {}
        for metric in self._snapshot():
            # all samples of a name belong together in the text format, whatever order the engine
            # has
            family = families.get(metric.name)
            if family is None:
                description = self._descriptions.get(metric.name, metric.name)
                counts = isinstance(metric, Counter | Vector)
                kind = "counter" if counts else type(metric).__name__.lower()
                family = Family(self._prefix + metric.name, description, kind)
                families[metric.name] = family
            self._add(family, metric)
        yield from families.values()

    def _add(self, family: Family, metric: Metric) -> None:
        name, labels = family.name, metric.labels
        if isinstance(metric, Gauge):
            family.add_sample(name, labels, metric.value)
            return
        if isinstance(metric, Vector):
            for position, value in enumerate(metric.values):
                at = {**labels, "position": str(position)}
                family.add_sample(f"{name}_total", at, value)
                family.add_sample(f"{name}_created", at, self._since)
            return
        if isinstance(metric, Counter):
            family.add_sample(f"{name}_total", labels, metric.value)
        else:
            _add_histogram(family, metric)
        family.add_sample(f"{name}_created", labels, self._since)


def registry_of(collector: MetricsCollector) -> CollectorRegistry:
    """A registry that has this collector, to which others may be added."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The text of all metrics of `registry`, and its content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(registry), CONTENT_TYPE_LATEST


def _add_histogram(family: Family, metric: Histogram) -> None:
    for bound, count in metric.buckets.items():
        family.add_sample(f"{family.name}_bucket", {**metric.labels, "le": bound}, count)
    family.add_sample(f"{family.name}_count", metric.labels, metric.count)
    family.add_sample(f"{family.name}_sum", metric.labels, metric.sum)
