"""The figures of one API server: they go to the owner of the cores, who shows those of all."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from quire.engine.shared_cores.broker_client import CoreBrokerClient
from quire.engine.shared_cores.broker_messages import MetricsNow, ServerReport
from quire.engine.stats.catalog import DESCRIPTIONS
from quire.engine.stats.engine_stats import PREFIX
from quire.engine.stats.step_stats import IterationStats, merge_stats
from quire.engine.wire.messages import SchedulerStats
from quire.observability.metrics import Metric
from quire.observability.prometheus import MetricsCollector


class ApiServerStats:
    """Stands where an engine in one process has `EngineStats`. `refresh` asks for everybody's
    figures; until the next time these are what there is.
    """

    def __init__(self, client: CoreBrokerClient) -> None:
        self._client = client
        self._pending: dict[int, IterationStats] = {}
        self._rejected: dict[str, int] = {}
        self._told_rejected: dict[str, int] = {}
        self._now = MetricsNow(time.time(), [])

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        """A part of a step was taken in here; the owner has seen the whole."""
        pending = self._pending.get(engine_index)
        if pending is None:
            pending = self._pending[engine_index] = IterationStats(step.iteration_timestamp)
        merge_stats(pending, step)

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """So many requests in all were refused here because of each limit."""
        self._rejected = dict(num_by_limit)

    def note_sleep(self, level: int | None) -> None:
        """The engine fell asleep at this level, or (None) is awake."""
        self._client.send_figures(ServerReport(sleep_level=-1 if level is None else level))

    def flush(self) -> None:
        """Send what was counted since the last time."""
        told, self._told_rejected = self._told_rejected, self._rejected
        rejected = {name: count - told.get(name, 0) for name, count in self._rejected.items()}
        if self._pending or any(rejected.values()) or rejected.keys() - told.keys():
            self._client.send_figures(ServerReport(list(self._pending.items()), rejected))
            self._pending = {}

    async def refresh(self) -> None:
        """Ask for the figures of the whole engine as they are now."""
        self._now = await self._client.metrics()

    def metrics(self, prefix: str = PREFIX) -> list[Metric]:
        """Everything as it was when it was last asked for."""
        found = self._now.metrics
        return [msgspec.structs.replace(metric, name=prefix + metric.name) for metric in found]

    def collector(self, prefix: str = PREFIX) -> MetricsCollector:
        """The same for a registry of `prometheus_client`."""
        return MetricsCollector(
            lambda: self._now.metrics, DESCRIPTIONS, prefix=prefix, since=self._now.since
        )

    def log(self) -> None:
        """The owner logs; here is a good moment to tell it what to log."""
        self.flush()
