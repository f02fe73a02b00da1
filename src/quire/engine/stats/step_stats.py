"""The statistics of one step of a core and its requests: the input of every stat logger."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.wire.output_parts import FinishReason


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
    """Whether NaN among its logits has ended it."""


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
    # the broker counts the tokens of whole steps
    into.num_step_tokens = 0
