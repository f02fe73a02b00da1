"""The figures of one engine: every step's go to the totals, to the log line and to stat loggers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.stats.loggers import (
    AggregatedLoggingStatLogger,
    LoggingStatLogger,
    StatLoggerBase,
    StatLoggers,
    StatsOptions,
)
from quire.engine.stats.step_stats import IterationStats
from quire.engine.stats.totals import DESCRIPTIONS, CacheFacts, MetricTotals
from quire.engine.wire.messages import SchedulerStats
from quire.observability.metrics import Metric
from quire.observability.prometheus import MetricsCollector

PREFIX = "vllm:"
"""What stands before the names of metrics unless somebody wishes otherwise: what existing
dashboards look for.
"""


class Stats(Protocol):
    """What a front end tells its figures, and asks for everybody's: `EngineStats`, or in one of
    several API servers broker_stats.py.
    """

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        """A core has made a step, or (`scheduler` None) requests were ended between two."""
        ...

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """So many requests in all were refused because of each limit."""
        ...

    def note_sleep(self, level: int | None) -> None:
        """The engine fell asleep at this level, or (None) is awake."""
        ...

    async def refresh(self) -> None:
        """Make `metrics` and `collector` show what is true now."""
        ...

    def metrics(self, prefix: str = PREFIX) -> list[Metric]:
        """Everything as it is, with the prefix before each name."""
        ...

    def collector(self, prefix: str = PREFIX) -> MetricsCollector:
        """The same for a registry of `prometheus_client`."""
        ...

    def log(self) -> None:
        """The interval of the log line is over."""
        ...


class EngineStats:
    """Hears of every step of every core of one engine. Costs a few microseconds a step.

    `plan` is what stat loggers are given; without one (an engine put together by hand)
    `max_model_len` gives the bounds of the length histograms.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        *,
        plan: EnginePlan | None = None,
        wish: StatsOptions | None = None,
        engine_indexes: Sequence[int] = (0,),
    ) -> None:
        self._totals = MetricTotals(model_name, max_model_len, _cache_facts(plan))
        for engine_index in engine_indexes:
            self._totals.core(engine_index)
        self.since = time.time()
        wish = wish or StatsOptions()
        wanted = list(wish.factories)
        if wish.has_log_line is not False:
            is_aggregated = wish.is_log_aggregated
            wanted.append(AggregatedLoggingStatLogger if is_aggregated else LoggingStatLogger)
        self._loggers = [StatLoggers(factory, plan, list(engine_indexes)) for factory in wanted]
        for stat_logger in self._all():
            stat_logger.log_engine_initialized()

    @classmethod
    def of_plan(
        cls, plan: EnginePlan, engine_indexes: Sequence[int], wish: StatsOptions | None
    ) -> Self:
        """Those of an engine that the plan describes."""
        wish = wish or StatsOptions()
        if wish.has_log_line is None:
            wish = replace(wish, has_log_line=plan.log_stats)
        name = plan.served_model_names[0]
        return cls(name, plan.max_model_len, plan=plan, wish=wish, engine_indexes=engine_indexes)

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        """A core has made a step, or (`scheduler` None) requests were ended between two."""
        if scheduler is not None:
            step.num_preempted_reqs = scheduler.num_preemptions
        self._totals.core(engine_index).record(scheduler, step)
        for loggers in self._loggers:
            loggers.of(engine_index).record(scheduler, step, None, engine_idx=engine_index)

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """So many requests in all were refused because of each limit."""
        self._totals.note_rejected(num_by_limit)

    def note_sleep(self, level: int | None) -> None:
        """The engine fell asleep at this level, or (None) is awake."""
        self._totals.sleep_level = level
        for stat_logger in self._all():
            stat_logger.record_sleep_state(int(level is None), level or 0)

    async def refresh(self) -> None:
        """They are always those of now."""

    def metrics(self, prefix: str = PREFIX) -> list[Metric]:
        """Everything as it is now, with the prefix before each name."""
        found = self._totals.metrics()
        return [msgspec.structs.replace(metric, name=prefix + metric.name) for metric in found]

    def collector(self, prefix: str = PREFIX) -> MetricsCollector:
        """The same for a registry of `prometheus_client`."""
        return MetricsCollector(self._totals.metrics, DESCRIPTIONS, prefix=prefix, since=self.since)

    def log(self) -> None:
        """Have every stat logger log what it has."""
        for stat_logger in self._all():
            stat_logger.log()

    def _all(self) -> list[StatLoggerBase]:
        return [one for loggers in self._loggers for one in loggers.all]


def _cache_facts(plan: EnginePlan | None) -> CacheFacts | None:
    if plan is None:
        return None
    return CacheFacts(
        block_size=plan.block_size,
        num_gpu_blocks=plan.num_blocks,
        cache_dtype=plan.kv_dtype,
        enable_prefix_caching=plan.enable_prefix_caching,
    )
