"""The statistics of one engine: every step is counted in the totals of its core, and passed on to
the log line and to the users' stat loggers.

The totals become metrics when they are asked for (`get_metrics()`, a scrape of `/metrics`). They
are not `prometheus_client`'s own objects: those cannot count a value several times at once, as a
step does whose rows all have the same inter-token latency, and their names have one prefix.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.stats.catalog import DESCRIPTIONS, histogram_bounds
from quire.engine.stats.draft_totals import DraftTotals
from quire.engine.stats.loggers import (
    AggregatedLoggingStatLogger,
    LoggingStatLogger,
    StatLoggers,
    StatsOptions,
)
from quire.engine.stats.operations import BOUNDS, OperationNote
from quire.engine.stats.step_stats import FinishedRequestStats, IterationStats
from quire.engine.stats.tier_totals import TIER_COUNTERS
from quire.engine.wire.messages import SchedulerStats
from quire.engine.wire.output_parts import FinishReason
from quire.observability.metrics import Counter, Gauge, Histogram, Metric
from quire.observability.prometheus import MetricsCollector

PREFIX = "vllm:"
"""The default prefix of metric names, which existing dashboards expect."""

_SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
"""Level of each sleep state; at level 0 the engine is in none of them."""
_ORDER = {name: place for place, name in enumerate(DESCRIPTIONS)}


MediaCounts = Callable[[], tuple[int, int]]


class Stats(ABC):
    """Statistics of a front end: `EngineStats`, or `ApiServerStats` of one among several."""

    since: float
    """The wall-clock time from which they count."""
    media_counts: MediaCounts | None = None
    """Queries and hits of the cache of processed media; None: there is none."""

    @abstractmethod
    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        """A core has made a step, or (`scheduler` None) requests ended between two steps."""

    @abstractmethod
    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """Take the total number of requests that each limit has refused."""

    @abstractmethod
    def note_sleep(self, level: int | None) -> None:
        """The engine is asleep at this level, or (None) awake."""

    @abstractmethod
    def note_operation(self, note: OperationNote) -> None:
        """A control call has begun or ended."""

    @abstractmethod
    async def refresh(self) -> None:
        """Bring `metrics` and `collector` up to date."""

    @abstractmethod
    def log(self) -> None:
        """Have every stat logger log: the interval of the log line is over."""

    def metrics(self, prefix: str = PREFIX) -> list[Metric]:
        """All metrics in the order of DESCRIPTIONS, with the prefix before each name."""
        return [msgspec.structs.replace(one, name=prefix + one.name) for one in self._metrics()]

    def collector(self, prefix: str = PREFIX) -> MetricsCollector:
        return MetricsCollector(self._metrics, DESCRIPTIONS, prefix=prefix, since=self.since)

    @abstractmethod
    def _metrics(self) -> list[Metric]: ...


class EngineStats(Stats):
    """Counts every step of every core of one engine. Costs a few microseconds a step.

    `lengths` are the bounds of histograms of lengths. `plan` is given to stat loggers; an engine
    built by hand has none.
    """

    def __init__(
        self,
        model_name: str,
        lengths: Sequence[float],
        *,
        plan: EnginePlan | None = None,
        options: StatsOptions | None = None,
        engine_indexes: Sequence[int] = (0,),
    ) -> None:
        self._model_name = model_name
        self._plan = plan
        given = (None if plan is None else plan.serving.histogram_buckets) or {}
        self._bounds = histogram_bounds(given, lengths)
        self._cores = {index: CoreTotals(self._bounds) for index in (0, *engine_indexes)}
        self._num_rejected: Mapping[str, int] = {}
        self._sleep_level: int | None = None
        self._operations = OperationTotals()
        self.since = time.time()
        options = options or StatsOptions()
        wanted = list(options.factories)
        if options.has_log_line is not False:
            is_aggregated = options.is_log_aggregated
            wanted.append(AggregatedLoggingStatLogger if is_aggregated else LoggingStatLogger)
        self._loggers = [StatLoggers(factory, plan, list(engine_indexes)) for factory in wanted]

    @classmethod
    def of_plan(
        cls, plan: EnginePlan, engine_indexes: Sequence[int], options: StatsOptions | None
    ) -> Self:
        """The statistics of an engine that the plan describes."""
        options = options or StatsOptions()
        if options.has_log_line is None:
            options = replace(options, has_log_line=plan.serving.log_stats)
        name = plan.model.served_model_names[0]
        return cls(
            name,
            plan.serving.length_buckets,
            plan=plan,
            options=options,
            engine_indexes=engine_indexes,
        )

    def record(
        self, scheduler: SchedulerStats | None, step: IterationStats, engine_index: int
    ) -> None:
        if scheduler is not None:
            step.num_preempted_reqs = scheduler.num_preemptions
        totals = self._cores.get(engine_index)
        if totals is None:
            totals = self._cores[engine_index] = CoreTotals(self._bounds)
        totals.record(scheduler, step)
        for loggers in self._loggers:
            loggers.record(scheduler, step, engine_index)

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        self._num_rejected = dict(num_by_limit)

    def note_sleep(self, level: int | None) -> None:
        self._sleep_level = level
        for loggers in self._loggers:
            loggers.record_sleep_state(int(level is not None), level or 0)

    def note_operation(self, note: OperationNote) -> None:
        self._operations.add(note)

    async def refresh(self) -> None:
        """Do nothing: the metrics are always up to date."""

    def log(self) -> None:
        for loggers in self._loggers:
            loggers.log()

    def _metrics(self) -> list[Metric]:
        found = [*self._of_the_engine()]
        for engine_index in sorted(self._cores):
            labels = {"model_name": self._model_name, "engine": str(engine_index)}
            found += self._cores[engine_index].metrics(labels)
        return sorted(found, key=lambda metric: _ORDER[metric.name])

    def _of_the_engine(self) -> Iterator[Metric]:
        yield from self._operations.metrics()
        for limit, count in self._num_rejected.items():
            labels = {"model_name": self._model_name, "reason": limit}
            yield Counter("admission_rejections", labels, count)
        if self.media_counts is not None:
            labels = {"model_name": self._model_name}
            names = ("mm_cache_queries", "mm_cache_hits")
            yield from (
                Counter(name, labels, count)
                for name, count in zip(names, self.media_counts(), strict=True)
            )
        for engine_index in sorted(self._cores):
            engine = str(engine_index)
            for name, level in _SLEEP_STATES.items():
                labels = {"model_name": self._model_name, "engine": engine, "sleep_state": name}
                yield Gauge("engine_sleep_state", labels, float(level == self._sleep_level))
            if self._plan is not None:
                cache = self._plan.memory.labels
                yield Gauge("cache_config_info", cache | {"engine": engine}, 1)
        if self._plan is not None and self._plan.adapters is not None:
            yield self._adapters_info(self._plan.adapters.max_loras)

    def _adapters_info(self, max_loras: int) -> Gauge:
        """One series with the names of the moment, and when they were reported."""
        latest = [core.latest for core in self._cores.values()]
        labels = {
            "max_lora": str(max_loras),
            "waiting_lora_adapters": _listed(each.waiting_adapters for each in latest),
            "running_lora_adapters": _listed(each.running_adapters for each in latest),
        }
        times = [core.latest_at for core in self._cores.values()]
        return Gauge("lora_requests_info", labels, max(times) or self.since)


class CoreTotals:
    """The totals of one core."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.latest = SchedulerStats()
        self.latest_at = 0.0
        self._counts: Counts[str] = Counts()
        self._num_ended = dict.fromkeys(FinishReason, 0)
        self._drafts = DraftTotals()
        self._histograms = {name: Buckets(grown) for name, grown in bounds.items()}

    def record(self, scheduler: SchedulerStats | None, step: IterationStats) -> None:
        counts, histograms = self._counts, self._histograms
        if scheduler is not None:
            self.latest, self.latest_at = scheduler, step.iteration_timestamp
            counts["num_preemptions"] += scheduler.num_preemptions
            counts["prefix_cache_queries"] += scheduler.prefix_cache_queries
            counts["prefix_cache_hits"] += scheduler.prefix_cache_hits
            for name in TIER_COUNTERS:
                counts[name] += getattr(scheduler, name)
            if scheduler.num_draft_tokens:
                self._drafts.add(scheduler)
        counts["prompt_tokens"] += step.num_prompt_tokens
        counts["prompt_tokens_cached"] += step.num_cached_tokens
        counts["generation_tokens"] += step.num_generation_tokens
        tokens = step.num_step_tokens
        if tokens is None:
            tokens = step.num_prompt_tokens - step.num_cached_tokens + step.num_generation_tokens
        if tokens:
            histograms["iteration_tokens_total"].add(tokens)
        for seconds in step.time_to_first_tokens_iter:
            histograms["time_to_first_token_seconds"].add(seconds)
        for seconds, times in step.num_by_gap.items():
            histograms["inter_token_latency_seconds"].add(seconds, times)
        for ended in step.finished_requests:
            self._end(ended)
        for number in step.n_params_iter:
            histograms["request_params_n"].add(number)
        for length in step.max_num_generation_tokens_iter:
            histograms["request_max_num_generation_tokens"].add(length)

    def _end(self, ended: FinishedRequestStats) -> None:
        self._num_ended[ended.finish_reason] += 1
        values: dict[str, float] = {
            "request_prompt_tokens": ended.num_prompt_tokens,
            "request_generation_tokens": ended.num_generation_tokens,
            "request_prefill_kv_computed_tokens": ended.num_prompt_tokens - ended.num_cached_tokens,
            "request_num_preemptions": ended.num_preemptions,
            "e2e_request_latency_seconds": ended.e2e_latency,
            "request_queue_time_seconds": ended.queued_time,
            "request_prefill_time_seconds": ended.prefill_time,
            "request_decode_time_seconds": ended.decode_time,
            "request_inference_time_seconds": ended.inference_time,
        }
        if ended.max_tokens_param is not None:
            values["request_params_max_tokens"] = ended.max_tokens_param
        if ended.num_generation_tokens > 1:
            values["request_time_per_output_token_seconds"] = ended.mean_time_per_output_token
        for name, value in values.items():
            self._histograms[name].add(value)

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        yield from self._gauges(labels)
        yield from self._counters(labels)
        yield from self._drafts.metrics(labels)
        for name, buckets in self._histograms.items():
            yield buckets.histogram(name, labels)

    def _gauges(self, labels: dict[str, str]) -> Iterator[Gauge]:
        latest = self.latest
        yield Gauge("num_requests_running", labels, latest.num_running_reqs)
        yield Gauge("num_requests_waiting", labels, latest.num_waiting_reqs)
        deferred = latest.num_deferred_reqs
        shares = {"capacity": latest.num_waiting_reqs - deferred, "deferred": deferred}
        for reason, count in shares.items():
            yield Gauge("num_requests_waiting_by_reason", {**labels, "reason": reason}, count)
        yield Gauge("kv_cache_usage_perc", labels, latest.kv_cache_usage)

    def _counters(self, labels: dict[str, str]) -> Iterator[Counter]:
        counts = self._counts
        own = ("prefix_cache_queries", "prefix_cache_hits", *TIER_COUNTERS, "num_preemptions")
        for name in own:
            yield Counter(name, labels, counts[name])
        for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens"):
            yield Counter(name, labels, counts[name])
        cached = counts["prompt_tokens_cached"]
        loaded = min(cached, counts["external_prefix_cache_hits"])
        by_source = {
            "local_compute": counts["prompt_tokens"] - cached,
            "local_cache_hit": cached - loaded,
            "external_kv_transfer": loaded,
        }
        for source, count in by_source.items():
            yield Counter("prompt_tokens_by_source", {**labels, "source": source}, count)
        for source, count in (("device", cached - loaded), ("external_unspecified", loaded)):
            yield Counter("prompt_tokens_cached_by_source", {**labels, "source": source}, count)
        for reason, count in self._num_ended.items():
            yield Counter("request_success", {**labels, "finished_reason": str(reason)}, count)


class OperationTotals:
    """The operations that were noted. A metric is there from its first use on."""

    def __init__(self) -> None:
        self._in_flight: Counts[tuple[str, str]] = Counts()
        self._durations: dict[tuple[str, str], Buckets] = {}

    def add(self, note: OperationNote) -> None:
        key = note.metric, note.operation
        self._in_flight[key] += 1 if note.seconds is None else -1
        durations = self._durations.setdefault(key, Buckets(BOUNDS))
        if note.seconds is not None:
            durations.add(note.seconds)

    def metrics(self) -> Iterator[Metric]:
        for (metric, operation), durations in self._durations.items():
            labels = {"operation": operation}
            yield durations.histogram(f"{metric}_operation_duration_seconds", labels)
            count = self._in_flight[metric, operation]
            yield Gauge(f"{metric}_operations_in_flight", labels, count)


class Buckets:
    """Counts values by size. `bounds` grow; a value equal to a bound belongs to it."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        totals = list(accumulate(self._counts))
        texts = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(texts, totals, strict=True)))


def _listed(names: Iterable[Sequence[str]]) -> str:
    return ",".join(sorted({name for each in names for name in each}))
