"""Counts what an engine has done, for `get_metrics()` and the log line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from quire.engine.protocol import EngineCoreOutputs, FinishReason, SchedulerStats

logger = logging.getLogger(__name__)


class Counter(msgspec.Struct, frozen=True):
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


class Gauge(msgspec.Struct, frozen=True):
    """A number as it is now."""

    name: str
    labels: dict[str, str]
    value: float


class EngineStats:
    """The running totals of one engine; names are those that dashboards of this field know."""

    def __init__(self, model_name: str, now: float) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._scheduler = SchedulerStats()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_ended = {str(reason): 0 for reason in FinishReason}
        self._num_rejected: dict[str, int] = {}
        self._logged = (now, 0, 0)

    def note_prompts(self, lengths: Iterable[int]) -> None:
        """Requests with prompts of these lengths were added."""
        self._num_prompt_tokens += sum(lengths)

    def note_step(self, step: EngineCoreOutputs) -> None:
        """The core has made a step."""
        self._num_generation_tokens += len(step.token_ids)
        if step.stats is not None:
            self._scheduler = step.stats

    def note_ended(self, reasons: Iterable[FinishReason]) -> None:
        """Completions ended for these reasons."""
        for reason in reasons:
            self._num_ended[str(reason)] += 1

    def note_rejected(self, num_by_limit: Mapping[str, int]) -> None:
        """So many requests in all were refused because of each limit."""
        self._num_rejected = dict(num_by_limit)

    def metrics(self) -> list[Counter | Gauge]:
        """Every metric, in a fixed order; `num_` gauges and cache counters are those of the last
        step.
        """
        latest = self._scheduler
        gauges = {
            "num_requests_running": latest.num_running,
            "num_requests_waiting": latest.num_waiting,
            "kv_cache_usage_perc": latest.kv_cache_usage,
        }
        counters = {
            "prefix_cache_queries": latest.prefix_cache_queries,
            "prefix_cache_hits": latest.prefix_cache_hits,
            "num_preemptions": latest.num_preemptions,
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": self._num_generation_tokens,
        }
        labels = self._labels
        return [
            *(Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
            *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
            *(
                Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
                for reason, count in self._num_ended.items()
            ),
            *(
                Counter("vllm:admission_rejections", {**labels, "reason": limit}, count)
                for limit, count in self._num_rejected.items()
            ),
        ]

    def log(self, now: float) -> None:
        """Log throughput since the last call and the state of the queues; `now` is monotonic, in
        seconds.
        """
        then, num_prompt, num_generation = self._logged
        self._logged = (now, self._num_prompt_tokens, self._num_generation_tokens)
        seconds = max(now - then, 1e-9)
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV %.1f %%",
            (self._num_prompt_tokens - num_prompt) / seconds,
            (self._num_generation_tokens - num_generation) / seconds,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            100 * self._scheduler.kv_cache_usage,
        )
