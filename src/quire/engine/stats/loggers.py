"""The stat loggers, which get the statistics of every step: the log line, and those of users.

A stat logger is named by argument (`stat_loggers=[factory]`), or a plugin of the group `GROUP`; a
factory is called with the plan and the index of a core.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quire.config.plan import EnginePlan
from quire.engine.stats.draft_totals import DraftTotals, in_words
from quire.engine.stats.step_stats import IterationStats
from quire.engine.stats.tier_totals import TIER_COUNTERS, TierTotals
from quire.engine.wire.messages import SchedulerStats
from quire.errors import InvalidType
from quire.plugins import load_group

logger = logging.getLogger(__name__)

GROUP = "stat_logger_plugins"
"""The group of plugins that are stat loggers."""

_HIT_WINDOW = 1000
"""Number of requests that the hit rate of the log line covers."""


class StatLoggerBase(ABC):
    """Records every step of one core; `vllm_config` is the plan, None for an engine without."""

    @abstractmethod
    def __init__(self, vllm_config: EnginePlan | None, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """A step is over. `scheduler_stats` is None when requests were ended between two steps;
        `mm_cache_stats` is None, since a text model has no media. Called in the thread that serves:
        keep it short, keep nothing of the arguments.
        """

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine can serve."""

    def log(self) -> None:  # noqa: B027 - a logger need not log
        """The interval of the log line is over."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:  # noqa: B027 - likewise
        """The engine fell asleep (1, with its level) or woke up (0, 0): `is_awake` has its name,
        and what it means, from the reference.
        """


class AggregateStatLoggerBase(StatLoggerBase):
    """One for all cores: `engine_indexes` are those there are at the start."""

    @abstractmethod
    def __init__(self, vllm_config: EnginePlan | None, engine_indexes: list[int]) -> None: ...


StatLoggerFactory = (
    Callable[[EnginePlan | None, int], StatLoggerBase] | type[AggregateStatLoggerBase]
)
"""Called for each core with the plan and the core's index; an aggregating class once, with all."""


class LoggingStatLogger(StatLoggerBase):
    """The line in the log: throughput since the last one, and how the queues stand."""

    def __init__(
        self,
        vllm_config: EnginePlan | None,
        engine_index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = vllm_config
        self._clock = clock
        self._latest = {engine_index: SchedulerStats()}
        self._hits: deque[tuple[int, int, int]] = deque()
        self._num_prompt = self._num_generated = 0
        self._drafts = DraftTotals()
        self._tier = TierTotals()
        self._since = clock()
        self._was_idle = True

    @property
    def _name(self) -> str:
        return f"engine {next(iter(self._latest))}"

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            step = iteration_stats
            self._num_prompt += step.num_prompt_tokens - step.num_cached_tokens
            self._num_generated += step.num_generation_tokens
        if scheduler_stats is not None:
            self._latest[engine_idx] = scheduler_stats
            if scheduler_stats.prefix_cache_requests:
                self._note_hits(scheduler_stats)
            if scheduler_stats.num_draft_tokens:
                self._drafts.add(scheduler_stats)
            if any(getattr(scheduler_stats, name) for name in TIER_COUNTERS):
                self._tier.add(scheduler_stats)

    def log_engine_initialized(self) -> None:
        plan = self._plan
        if plan is not None:
            labels = plan.memory.labels
            count, size = labels["num_gpu_blocks"], labels["block_size"]
            logger.info("The KV cache has %s blocks of %s tokens.", count, size)

    def log(self) -> None:
        """Log a line; at DEBUG where nothing has happened since the last line nor before it."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        num_prompt, num_generated = self._num_prompt, self._num_generated
        self._since, self._num_prompt, self._num_generated = now, 0, 0
        is_idle = not num_prompt and not num_generated
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        self._was_idle = is_idle
        stood = self._latest.values()
        logger.log(
            level,
            "%s: prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
            "KV %.1f %%, prefix hits %.1f %%",
            self._name,
            num_prompt / seconds,
            num_generated / seconds,
            sum(stats.num_running_reqs for stats in stood),
            sum(stats.num_waiting_reqs for stats in stood),
            100 * sum(stats.kv_cache_usage for stats in stood) / max(1, len(self._latest)),
            self._hit_percent(),
        )
        drafts = self._drafts.take()
        if drafts is not None:
            logger.log(level, "%s: drafts: %s", self._name, in_words(drafts, seconds))
        transfers = self._tier.take()
        if transfers is not None:
            logger.log(level, "%s: KV Transfer metrics: %s", self._name, transfers)

    def _note_hits(self, stats: SchedulerStats) -> None:
        entry = (stats.prefix_cache_requests, stats.prefix_cache_queries, stats.prefix_cache_hits)
        self._hits.append(entry)
        num_requests = sum(requests for requests, _, _ in self._hits)
        while num_requests - self._hits[0][0] >= _HIT_WINDOW:
            num_requests -= self._hits.popleft()[0]

    def _hit_percent(self) -> float:
        queries = sum(entry[1] for entry in self._hits)
        return 100 * sum(entry[2] for entry in self._hits) / max(1, queries)


class AggregatedLoggingStatLogger(LoggingStatLogger, AggregateStatLoggerBase):
    """One such line for all cores together."""

    def __init__(self, vllm_config: EnginePlan | None, engine_indexes: list[int]) -> None:
        super().__init__(vllm_config)
        self._latest = dict.fromkeys(engine_indexes, SchedulerStats())

    @property
    def _name(self) -> str:
        return f"{len(self._latest)} engines"


class StatLoggers:
    """The loggers of one factory: a single one, or one for each core as it appears. What their
    methods raise once the engine runs is in the log, the first time, and costs nothing else.
    """

    def __init__(
        self, factory: StatLoggerFactory, plan: EnginePlan | None, engine_indexes: list[int]
    ) -> None:
        if not callable(factory):
            raise InvalidType("stat_loggers", factory, "it must be a list of callables")
        self._plan = plan
        self._one: StatLoggerBase | None = None
        if isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase):
            self._one = factory(plan, engine_indexes)
        self._make = cast(Callable[[EnginePlan | None, int], StatLoggerBase], factory)
        one_each = engine_indexes if self._one is None else []
        self._by_core = {index: self._make(plan, index) for index in one_each}
        self._failed: set[str] = set()
        for stat_logger in self._all():
            stat_logger.log_engine_initialized()

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        try:
            # the code of a user must not end the engine, not by sys.exit either
            self._of(engine_index).record(scheduler, step, None, engine_idx=engine_index)
        except (Exception, SystemExit) as error:
            self._note("record", error)

    def record_sleep_state(self, is_asleep: int, level: int) -> None:
        self._call("record_sleep_state", is_asleep, level)

    def log(self) -> None:
        self._call("log")

    def _call(self, method: str, *args: int) -> None:
        for stat_logger in self._all():
            try:
                getattr(stat_logger, method)(*args)
            except (Exception, SystemExit) as error:
                self._note(method, error)

    def _note(self, method: str, error: BaseException) -> None:
        if method not in self._failed:
            self._failed.add(method)
            text = "%s of a stat logger failed; statistics go on, and this is logged once."
            logger.error(text, method, exc_info=error)

    def _all(self) -> list[StatLoggerBase]:
        return list(self._by_core.values()) if self._one is None else [self._one]

    def _of(self, engine_index: int) -> StatLoggerBase:
        if self._one is not None:
            return self._one
        found = self._by_core.get(engine_index)
        if found is None:
            found = self._by_core[engine_index] = self._make(self._plan, engine_index)
        return found


@dataclass(frozen=True)
class StatsOptions:
    """The receivers of an engine's statistics: stat loggers, whether there is a line in the log
    (None: if statistics are on), and whether that is one line for all cores.
    """

    factories: tuple[StatLoggerFactory, ...] = ()
    has_log_line: bool | None = None
    is_log_aggregated: bool = False


def with_log_stats(plan: EnginePlan, log_stats: bool | None) -> EnginePlan:
    """The plan with statistics on or off; None: as it is."""
    return plan if log_stats is None else plan.changed(log_stats=log_stats)


def with_stat_loggers(
    plan: EnginePlan,
    given: Sequence[StatLoggerFactory] | None = None,
    is_log_aggregated: bool = False,
) -> tuple[EnginePlan, StatsOptions]:
    """Collect the given and installed stat loggers. If there are any, the returned plan keeps
    statistics, but the log lines stay off unless they were on.

    Raises InvalidType for one that is not a stat logger.
    """
    factories = list(given or ())
    for name, factory in load_group(GROUP).items():
        if not (isinstance(factory, type) and issubclass(factory, StatLoggerBase)):
            allowed = "it must be a subclass of quire.engine.stats.loggers.StatLoggerBase"
            raise InvalidType(f"{GROUP}: {name}", factory, allowed)
        if factory not in factories:
            factories.append(factory)
    options = StatsOptions(tuple(factories), plan.serving.log_stats, is_log_aggregated)
    if factories and not plan.serving.log_stats:
        plan = plan.changed(log_stats=True)
    return plan, options
