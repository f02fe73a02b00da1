"""The running totals of an engine by the names that dashboards of this field know.

They are a stat logger like any other: they see every step's figures. What they hold is turned into
metrics when somebody asks (`get_metrics()`, a scrape of `/metrics`).
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quire.engine.stats.step_stats import FinishedRequestStats, IterationStats
from quire.engine.wire.messages import FinishReason, SchedulerStats
from quire.observability.metrics import Buckets, Counter, Gauge, Histogram, Metric, sizes_up_to

DESCRIPTIONS = {
    "num_requests_running": "Number of requests in the running batch.",
    "num_requests_waiting": "Number of requests waiting to be scheduled.",
    "num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "kv_cache_usage_perc": "KV cache usage as a fraction of all blocks; 1 is full.",
    "engine_sleep_state": "Sleep state of the engine: 1 for the current state, 0 for the others.",
    "cache_config_info": "Configuration of the KV cache.",
    "prefix_cache_queries": "Prefix cache queries, in tokens.",
    "prefix_cache_hits": "Prefix cache hits, in tokens.",
    "num_preemptions": "Cumulative number of preemptions.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Number of prompt tokens by source of their K/V.",
    "prompt_tokens_cached": "Number of prompt tokens served from the prefix cache.",
    "prompt_tokens_cached_by_source": "Number of cached prompt tokens by source.",
    "generation_tokens": "Number of generation tokens processed.",
    "request_success": "Number of finished requests by finish reason.",
    "admission_rejections": "Number of requests rejected by admission control.",
    "request_prompt_tokens": "Histogram of prompt tokens per request.",
    "request_generation_tokens": "Histogram of generation tokens per request.",
    "request_max_num_generation_tokens": "Histogram of tokens of the longest completion.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_prefill_kv_computed_tokens": "Histogram of computed prompt tokens per request.",
    "request_num_preemptions": "Histogram of preemptions per request.",
    "iteration_tokens_total": "Histogram of tokens per engine step, prefill and decode.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time per output token, in seconds.",
    "e2e_request_latency_seconds": "Histogram of end-to-end request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in the WAITING state, in seconds.",
    "request_prefill_time_seconds": "Histogram of time spent in prefill, in seconds.",
    "request_decode_time_seconds": "Histogram of time spent in decode, in seconds.",
    "request_inference_time_seconds": "Histogram of time spent in the RUNNING state, in seconds.",
}
"""Every metric in the order of exposition, with its help text."""

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class CacheFacts(NamedTuple):
    """What `cache_config_info` tells of the KV cache."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool


class MetricTotals:
    """The totals of all cores of an engine; a core that nobody has heard of begins at 0.

    `sleep_level` is that of the sleep in force (None: awake).
    """

    def __init__(
        self, model_name: str, max_model_len: int, cache: CacheFacts | None = None
    ) -> None:
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._cache = cache
        self._cores: dict[int, _CoreTotals] = {}
        self._num_rejected: Mapping[str, int] = {}
        self.sleep_level: int | None = None
        self.core(0)

    def core(self, engine_index: int) -> _CoreTotals:
        """The totals of one core."""
        found = self._cores.get(engine_index)
        if found is None:
            found = self._cores[engine_index] = _CoreTotals(self._max_model_len)
        return found

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """So many requests in all were refused because of each limit."""
        self._num_rejected = dict(num_by_limit)

    def metrics(self) -> list[Metric]:
        """Everything as it is now, in the order of DESCRIPTIONS."""
        found = [*self._of_the_engine()]
        for engine_index in sorted(self._cores):
            labels = {"model_name": self._model_name, "engine": str(engine_index)}
            found += self._cores[engine_index].metrics(labels)
        order = {name: place for place, name in enumerate(DESCRIPTIONS)}
        return sorted(found, key=lambda metric: order[metric.name])

    def _of_the_engine(self) -> Iterator[Metric]:
        for limit, count in self._num_rejected.items():
            labels = {"model_name": self._model_name, "reason": limit}
            yield Counter("admission_rejections", labels, count)
        state = _SLEEP_STATES[min(self.sleep_level or 0, 2)]
        for engine_index in sorted(self._cores):
            engine = str(engine_index)
            for name in _SLEEP_STATES:
                labels = {"model_name": self._model_name, "engine": engine, "sleep_state": name}
                yield Gauge("engine_sleep_state", labels, float(name == state))
            if self._cache is not None:
                facts = {name: str(value) for name, value in self._cache._asdict().items()}
                yield Gauge("cache_config_info", {**facts, "engine": engine}, 1)


class _CoreTotals:
    """The totals of one core."""

    def __init__(self, max_model_len: int) -> None:
        self._latest = SchedulerStats()
        self._counts: Counts[str] = Counts()
        self._num_ended = dict.fromkeys(FinishReason, 0)
        sizes = sizes_up_to(max_model_len)
        self._prompt_tokens = Buckets(sizes)
        self._generation_tokens = Buckets(sizes)
        self._longest = Buckets(sizes)
        self._max_tokens = Buckets(sizes)
        self._computed = Buckets(sizes)
        self._num_completions = Buckets((1, 2, 5, 10, 20))
        self._preemptions = Buckets((1, 2, 3, 4, 5, 10, 20))
        self._step_tokens = Buckets(_STEP_TOKENS)
        self._first_token = Buckets(_TTFT)
        self._gaps = Buckets(_GAP)
        self._mean_gap = Buckets(_GAP)
        self._whole, self._queued, self._prefill, self._decode, self._inference = (
            Buckets(_LATENCY) for _ in range(5)
        )

    def record(self, scheduler: SchedulerStats | None, step: IterationStats) -> None:
        """Count one step."""
        counts = self._counts
        if scheduler is not None:
            self._latest = scheduler
            counts["num_preemptions"] += scheduler.num_preemptions
            counts["prefix_cache_queries"] += scheduler.prefix_cache_queries
            counts["prefix_cache_hits"] += scheduler.prefix_cache_hits
        counts["prompt_tokens"] += step.num_prompt_tokens
        counts["prompt_tokens_cached"] += step.num_cached_tokens
        counts["generation_tokens"] += step.num_generation_tokens
        tokens = step.num_step_tokens
        if tokens is None:
            tokens = step.num_prompt_tokens - step.num_cached_tokens + step.num_generation_tokens
        if tokens:
            self._step_tokens.add(tokens)
        for seconds in step.time_to_first_tokens_iter:
            self._first_token.add(seconds)
        for seconds, times in step.num_by_gap.items():
            self._gaps.add(seconds, times)
        for ended in step.finished_requests:
            self._end(ended)
        for number in step.n_params_iter:
            self._num_completions.add(number)
        for length in step.max_num_generation_tokens_iter:
            self._longest.add(length)

    def _end(self, ended: FinishedRequestStats) -> None:
        self._num_ended[ended.finish_reason] += 1
        self._prompt_tokens.add(ended.num_prompt_tokens)
        self._generation_tokens.add(ended.num_generation_tokens)
        self._computed.add(ended.num_prompt_tokens - ended.num_cached_tokens)
        self._preemptions.add(ended.num_preemptions)
        if ended.max_tokens_param is not None:
            self._max_tokens.add(ended.max_tokens_param)
        if ended.num_generation_tokens > 1:
            self._mean_gap.add(ended.mean_time_per_output_token)
        self._whole.add(ended.e2e_latency)
        self._queued.add(ended.queued_time)
        self._prefill.add(ended.prefill_time)
        self._decode.add(ended.decode_time)
        self._inference.add(ended.inference_time)

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        yield from self._gauges(labels)
        yield from self._counters(labels)
        yield from self._histograms(labels)

    def _gauges(self, labels: dict[str, str]) -> Iterator[Gauge]:
        latest = self._latest
        yield Gauge("num_requests_running", labels, latest.num_running_reqs)
        yield Gauge("num_requests_waiting", labels, latest.num_waiting_reqs)
        for reason, count in (("capacity", latest.num_waiting_reqs), ("deferred", 0)):
            yield Gauge("num_requests_waiting_by_reason", {**labels, "reason": reason}, count)
        yield Gauge("kv_cache_usage_perc", labels, latest.kv_cache_usage)

    def _counters(self, labels: dict[str, str]) -> Iterator[Counter]:
        counts = self._counts
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
            yield Counter(name, labels, counts[name])
        for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens"):
            yield Counter(name, labels, counts[name])
        cached = counts["prompt_tokens_cached"]
        by_source = {
            "local_compute": counts["prompt_tokens"] - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        for source, count in by_source.items():
            yield Counter("prompt_tokens_by_source", {**labels, "source": source}, count)
        yield Counter("prompt_tokens_cached_by_source", {**labels, "source": "device"}, cached)
        for reason, count in self._num_ended.items():
            yield Counter("request_success", {**labels, "finished_reason": str(reason)}, count)

    def _histograms(self, labels: dict[str, str]) -> Iterator[Histogram]:
        by_name = {
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": self._generation_tokens,
            "request_max_num_generation_tokens": self._longest,
            "request_params_max_tokens": self._max_tokens,
            "request_params_n": self._num_completions,
            "request_prefill_kv_computed_tokens": self._computed,
            "request_num_preemptions": self._preemptions,
            "iteration_tokens_total": self._step_tokens,
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._gaps,
            "request_time_per_output_token_seconds": self._mean_gap,
            "e2e_request_latency_seconds": self._whole,
            "request_queue_time_seconds": self._queued,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "request_inference_time_seconds": self._inference,
        }
        for name, buckets in by_name.items():
            yield buckets.histogram(name, labels)
