"""The statistics of one API server, which it reports to the broker; the broker has those of all."""

from __future__ import annotations

import time
from collections.abc import Mapping

from quire.engine.shared_cores.broker_client import CoreBrokerClient
from quire.engine.shared_cores.broker_messages import ServerReport
from quire.engine.stats.engine_stats import Stats
from quire.engine.stats.operations import OperationNote
from quire.engine.stats.step_stats import IterationStats, merge_stats
from quire.engine.wire.messages import SchedulerStats
from quire.observability.metrics import Metric


class ApiServerStats(Stats):
    """One server's statistics; `refresh` asks the broker for all, which `metrics` returns then."""

    def __init__(self, client: CoreBrokerClient) -> None:
        self._client = client
        self._pending: dict[int, IterationStats] = {}
        self._rejected: dict[str, int] = {}
        self._reported_rejected: dict[str, int] = {}
        self._reported_media = (0, 0)
        self._sleep_level: int | None = None
        self._operations: list[OperationNote] = []
        self._found: list[Metric] = []
        self.since = time.time()

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        """Count a part of a step; the broker has seen the whole."""
        pending = self._pending.get(engine_index)
        if pending is None:
            pending = self._pending[engine_index] = IterationStats(step.iteration_timestamp)
        merge_stats(pending, step)

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        self._rejected = dict(num_by_limit)

    def note_sleep(self, level: int | None) -> None:
        self._sleep_level = -1 if level is None else level

    def note_operation(self, note: OperationNote) -> None:
        self._operations.append(note)

    def take(self) -> ServerReport:
        before, self._reported_rejected = self._reported_rejected, self._rejected
        # differences: the broker adds up the reports of servers that come and go
        rejected = {name: count - before.get(name, 0) for name, count in self._rejected.items()}
        report = ServerReport(list(self._pending.items()), rejected, self._sleep_level)
        report.media = self._new_media()
        report.operations, self._operations = self._operations, []
        self._pending, self._sleep_level = {}, None
        return report

    def _new_media(self) -> tuple[int, int] | None:
        if self.media_counts is None:
            return None
        (old_queries, old_hits), now = self._reported_media, self.media_counts()
        self._reported_media = now
        return now[0] - old_queries, now[1] - old_hits

    async def refresh(self) -> None:
        now = await self._client.metrics()
        self.since, self._found = now.since, now.metrics

    def _metrics(self) -> list[Metric]:
        return self._found

    def log(self) -> None:
        """The owner of the cores logs: report what there is to log."""
        self._client.report()
