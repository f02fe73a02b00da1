"""The statistics of one step of a core and its requests: the input of every stat logger."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.wire.output_parts import Finished, FinishReason
from quire.outputs import RequestStateStats


@dataclass(slots=True)
class FinishedRequestStats:
    """One completion that has ended; times in seconds.

    `queued_time` passed before it was scheduled, `prefill_time` until its first token,
    `decode_time` from there to its last; `inference_time` is both of these. A completion that
    never got so far has 0 there.
    """

    finish_reason: FinishReason
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_corrupted: bool = False
    """Its logits had NaN, which ended it."""


@dataclass(slots=True)
class IterationStats:
    """One step's figures, by the names that stat loggers of this field read.

    `iteration_timestamp` is by the wall clock. `num_prompt_tokens` are those of requests whose
    first token came in this step, `num_cached_tokens` of these from the prefix cache.
    `num_by_gap` counts outputs by the seconds since the same completion's last one. `n_params_iter`
    and `max_num_generation_tokens_iter` have an entry for each request whose last completion ended.
    `num_step_tokens`: what the whole step computed, where these are the figures of a part of one or
    of several; None: of this one.
    """

    iteration_timestamp: float
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    num_by_gap: dict[float, int] = field(default_factory=dict)
    n_params_iter: list[int] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    num_step_tokens: int | None = None

    @property
    def inter_token_latencies_iter(self) -> list[float]:
        """The gaps, one entry for each."""
        return [gap for gap, count in self.num_by_gap.items() for _ in range(count)]


def merge_stats(into: IterationStats, more: IterationStats) -> None:
    """Add the figures of `more`; whole steps cannot be told apart in the sum."""
    into.num_generation_tokens += more.num_generation_tokens
    into.num_prompt_tokens += more.num_prompt_tokens
    into.num_cached_tokens += more.num_cached_tokens
    into.finished_requests += more.finished_requests
    into.time_to_first_tokens_iter += more.time_to_first_tokens_iter
    for gap, count in more.num_by_gap.items():
        into.num_by_gap[gap] = into.num_by_gap.get(gap, 0) + count
    into.n_params_iter += more.n_params_iter
    into.max_num_generation_tokens_iter += more.max_num_generation_tokens_iter
    into.num_step_tokens = 0


def note_tokens(
    stats: IterationStats, times: RequestStateStats, num_tokens: int, now: float
) -> None:
    """A completion got tokens in the step that ended at `now` (monotonic)."""
    last = times.last_token_ts
    if times.num_generation_tokens:
        gap = now - last
        stats.num_by_gap[gap] = stats.num_by_gap.get(gap, 0) + 1
    else:
        times.first_token_ts = now
        times.first_token_latency = max(0.0, stats.iteration_timestamp - times.arrival_time)
        stats.time_to_first_tokens_iter.append(times.first_token_latency)
    times.num_generation_tokens += num_tokens
    times.last_token_ts = now


def finished_stats(
    times: RequestStateStats,
    end: Finished,
    now: float,
    *,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    max_tokens: int | None,
) -> FinishedRequestStats:
    """The figures of a completion that ends at `now` (wall clock); `times` gets the
    preemptions.
    """
    times.num_preemptions = end.num_preemptions
    times.is_corrupted = end.num_nans_in_logits > 0
    scheduled, first, last = times.scheduled_ts, times.first_token_ts, times.last_token_ts
    num_tokens = times.num_generation_tokens
    decode = max(0.0, last - first)
    return FinishedRequestStats(
        finish_reason=end.reason,
        e2e_latency=max(0.0, now - times.arrival_time),
        num_prompt_tokens=num_prompt_tokens,
        num_generation_tokens=num_tokens,
        max_tokens_param=max_tokens,
        queued_time=max(0.0, scheduled - times.queued_ts) if scheduled else 0.0,
        prefill_time=max(0.0, first - scheduled) if first else 0.0,
        inference_time=max(0.0, last - scheduled) if last else 0.0,
        decode_time=decode,
        mean_time_per_output_token=decode / (num_tokens - 1) if num_tokens > 1 else 0.0,
        num_cached_tokens=num_cached_tokens,
        num_preemptions=end.num_preemptions,
        is_corrupted=times.is_corrupted,
    )
