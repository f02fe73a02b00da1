"""The state of an unfinished request: what its completions share, each one's text, logprobs and
how much of them the caller already has, and the figures of its times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.engine.frontend.output_text import OutputText
from quire.engine.outputs.kept_part import KeptPart
from quire.engine.outputs.logprobs import MAX_CONTEXT, LogprobFrame, OutputLogprobs
from quire.engine.stats.step_stats import FinishedRequestStats, IterationStats
from quire.engine.wire.messages import FIRST_VERSION
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.lora.request import LoRARequest
from quire.observability.tracing import RequestSpan
from quire.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStateStats,
    WeightVersionSpan,
    make_request_output,
)
from quire.params import RequestOutputKind
from quire.step.part import OutputPart

_CUMULATIVE, _DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The state that the completions of one request share, and their outputs that are still to
    come.

    `request_id` is the caller's, `internal_id` ours. `num_open` completions have not ended; in
    FINAL_ONLY the ended ones wait in `ended` for the others.
    """

    request_id: str
    internal_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    output_kind: RequestOutputKind
    handles: range
    num_open: int
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    is_queued: bool = True
    num_longest: int = 0
    """Tokens of the longest completion that has ended."""
    num_generated: int = 0
    """Tokens of all completions that have ended."""
    span: RequestSpan | None = None
    prompt_logprobs: object = None
    prompt_token_id_logprobs: object = None
    mailbox: RequestOutputCollector | None = None
    """Receiver of the outputs; None: they are returned by the engine's step."""
    ended: list[CompletionOutput] = field(default_factory=list)
    kv_transfer_params: Mapping[str, Any] | None = None
    """Fields of the last output about files that the engine has written."""

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0

    def set_output_kind(self, kind: RequestOutputKind) -> None:
        """Have outputs of this kind, of which there has not been any."""
        self.output_kind = kind
        if self.mailbox is not None:
            self.mailbox.set_output_kind(kind)

    def output(
        self, completion: CompletionOutput, metrics: RequestStateStats | None
    ) -> RequestOutput | None:
        """The output with this `completion`; None while FINAL_ONLY waits for the others."""
        outputs = [completion]
        if self.output_kind is RequestOutputKind.FINAL_ONLY and len(self.handles) > 1:
            self.ended.append(completion)
            if self.num_open:
                return None
            outputs = sorted(self.ended, key=lambda ended: ended.index)
        prompt_logprobs, scores = self.prompt_logprobs, self.prompt_token_id_logprobs
        if self.output_kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = self.prompt_token_id_logprobs = None
        return make_request_output(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            outputs,
            self.num_open == 0,
            metrics,
            lora_request=self.lora_request,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self._written(completion),
            prompt_token_id_logprobs=scores,
        )

    def _written(self, last: CompletionOutput) -> Mapping[str, Any] | None:
        is_done = self.num_open == 0 and last.finish_reason not in ("abort", "error")
        return self.kv_transfer_params if is_done else None


class RequestState:
    """Collects a completion's tokens and makes `RequestOutput`s of the requested kind.

    `interval`: a DELTA output comes with the first token, then every `interval` tokens, then at the
    end. `engine_index` is the core that runs it; `times` is kept if statistics are on. `kept` has,
    by kind, the parts of its output that are apart from its tokens.
    """

    __slots__ = (
        *("_interval", "_kind", "_num_given", "engine_index", "group", "handle", "index"),
        *("is_ended", "kept", "logprobs", "max_tokens", "text", "times", "versions"),
    )

    def __init__(
        self,
        handle: int,
        group: RequestGroup,
        text: OutputText,
        *,
        interval: int,
        logprobs: OutputLogprobs | None = None,
        kept: dict[type[OutputPart], KeptPart] | None = None,
        times: RequestStateStats | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.handle = handle
        self.index = handle - group.handles.start
        self.group = group
        self.is_ended = False
        self.text = text
        self.logprobs = logprobs
        self.kept = kept
        self.times = times
        self.max_tokens = max_tokens
        self.engine_index = 0
        self._kind = group.output_kind
        self._interval = interval
        self._num_given = 0
        self.versions: list[tuple[int, str]] | None = None
        """The places of the first tokens that were drawn with weights of each version."""

    def note_version(self, version: str) -> None:
        """The next tokens were drawn with weights of this version."""
        place = len(self.text.token_ids)
        if self.versions is None:
            self.versions = [(0, FIRST_VERSION)] if place else []
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((place, version))

    def take_in(
        self, ids: Sequence[int], ends_request: bool, frame: LogprobFrame | None, position: int
    ) -> str | None:
        """Add the ids at `position` of a step; returns the stop string that they complete."""
        if self.logprobs is None or frame is None:
            return self.text.feed(ids, ends_request)
        token_ids = self.text.token_ids
        before = len(token_ids)
        stop = self.text.feed(ids, ends_request)
        # ids after a stop string were dropped, and so are their logprobs
        for place in range(before, len(token_ids)):
            context = token_ids[max(0, place - MAX_CONTEXT) : place]
            self.logprobs.add(frame, frame.at[position + place - before], context)
        return stop

    def take_part(self, part: OutputPart) -> None:
        """Take in a part of a kind that is kept; others are ignored. One that fails is not kept."""
        kept = None if self.kept is None else self.kept.get(part.__class__)
        if self.kept is None or kept is None:
            if part.comes_at_end:
                raise TypeError(f"a generation got a {type(part).__name__}")
            return
        try:
            kept.add(part)
        except Exception:
            del self.kept[part.__class__]
            raise

    @property
    def is_due(self) -> bool:
        if self._kind is _DELTA:
            num_new = len(self.text.token_ids) - self._num_given
            return self._num_given == 0 or num_new >= self._interval
        return self._kind is _CUMULATIVE

    def partial(self) -> RequestOutput | None:
        """The output that is due now, before the end; None if no output is due."""
        return self.news() if self.is_due else None

    def news(self) -> RequestOutput | None:
        """The output with everything new, whether it is due or not."""
        completion = self._completion()
        if self.kept:
            return self._output(completion)
        return self.group.output(completion, self.times)

    def final(self, end: Finished) -> RequestOutput | None:
        """The last output of this completion; None while FINAL_ONLY waits for its siblings."""
        self.text.close()
        completion = self._completion()
        completion.finish_reason, completion.stop_reason = end.reason.name.lower(), end.stop_reason
        completion.error = end.message
        if self.kept:
            num_tokens = len(self.group.prompt_token_ids) + len(self.text.token_ids)
            for kept in self.kept.values():
                kept.end(completion, num_tokens)
        self.is_ended = True
        self.group.num_open -= 1
        return self._output(completion)

    def failed(self, error: str) -> RequestOutput | None:
        """The last output after an error in text or logprobs: what was complete before it."""
        self.text.abandon()
        self.logprobs = None
        return self.final(Finished(self.handle, FinishReason.ERROR, None, error))

    def _output(self, completion: CompletionOutput) -> RequestOutput | None:
        if self.kept:
            for kept in self.kept.values():
                kept.join(self.group)
        return self.group.output(completion, self.times)

    def _completion(self) -> CompletionOutput:
        completion = self._delta() if self._kind is _DELTA else self._whole()
        completion.lora_request = self.group.lora_request
        if self.versions is not None:
            ends = [start for start, _ in self.versions[1:]] + [len(self.text.token_ids)]
            spans = zip(self.versions, ends, strict=True)
            completion.weight_versions = [WeightVersionSpan(s, end, v) for (s, v), end in spans]
        return completion

    def _delta(self) -> CompletionOutput:
        start, ids = self._num_given, self.text.token_ids
        self._num_given = len(ids)
        if self.logprobs is None:
            return CompletionOutput(self.index, self.text.take(), ids[start:])
        logprobs = self.logprobs.positions[start:]
        cumulative = self.logprobs.cumulative
        return CompletionOutput(self.index, self.text.take(), ids[start:], cumulative, logprobs)

    def _whole(self) -> CompletionOutput:
        ids = self.text.token_ids.copy()
        if self.logprobs is None:
            return CompletionOutput(self.index, self.text.so_far(), ids)
        return CompletionOutput(
            self.index, self.text.so_far(), ids, self.logprobs.cumulative, self.logprobs.positions
        )


def note_tokens(
    stats: IterationStats, times: RequestStateStats, num_tokens: int, now: float
) -> None:
    """A completion got tokens in the step that ended at `now` (monotonic)."""
    last = times.last_token_ts
    if times.num_generation_tokens:
        gap = now - last
        # requests that were in the same two steps have equal gaps: there are few entries
        stats.num_by_gap[gap] = stats.num_by_gap.get(gap, 0) + 1
    else:
        times.first_token_ts = now
        # callers may give a time of arrival, and the wall clock may be set back
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
    """The figures of a completion that ends at `now` (wall clock); `times` gets preemptions."""
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
