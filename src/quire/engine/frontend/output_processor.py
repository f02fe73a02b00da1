"""Step 8 of 8: new token ids become text and `RequestOutput`s.

In: `EngineCoreOutputs`, the columns of one step. Out: the outputs that are due now, and the
requests that a stop string has ended, which the core does not know yet. From here they go back to
the caller in llm_engine.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from quire.engine.counterparts import HasCounterparts
from quire.engine.frontend.output_text import OutputText
from quire.engine.frontend.pooling_state import PoolingState
from quire.engine.frontend.request_spans import end_span
from quire.engine.frontend.request_state import (
    RequestGroup,
    RequestState,
    finished_stats,
    note_tokens,
)
from quire.engine.outputs.kept_part import PartKind
from quire.engine.outputs.kinds import PLAIN_KINDS
from quire.engine.outputs.logprobs import LogprobFrame, OutputLogprobs
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.messages import FIRST_VERSION, EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.outputs import RequestOutput, RequestStateStats
from quire.params import PoolingParams, SamplingParams
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


AnyOutput: TypeAlias = RequestOutput | PoolingRequestOutput[PoolingOutput]
State: TypeAlias = RequestState | PoolingState


def failure_of(output: AnyOutput) -> str | None:
    """The error of a result, or of the first completion that failed; None: none did."""
    if isinstance(output, PoolingRequestOutput):
        return output.error
    for completion in output.outputs:
        if completion.finish_reason == "error":
            return completion.error or "The generation failed."
    return None


class Processed(NamedTuple):
    """The result of processing one step: outputs for the callers, the handles that the core must
    abort, why completions ended, and the statistics by core. Outputs of requests with a mailbox are
    put there instead.
    """

    outputs: list[AnyOutput]
    stopped: list[int]
    ended: list[FinishReason]
    stats: dict[int, IterationStats]


class OutputProcessor(HasCounterparts):
    """Holds every unfinished request of a front end and turns steps of the core into outputs.

    Invariants: `_states` has the completions that have not ended; `_groups` (by our id) and
    `_by_name` (by the caller's) the requests that have one of these. An exception in one request's
    text or logprobs ends that request alone, with the reason "error".
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        log_stats: bool = False,
        kinds: Sequence[PartKind] = PLAIN_KINDS,
    ) -> None:
        """`kinds`: the parts of outputs that completions keep."""
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._log_stats = log_stats
        self._kinds = kinds
        self._states: dict[int, State] = {}
        self._groups: dict[str, RequestGroup] = {}
        self._by_name: dict[str, list[RequestGroup]] = {}
        self.num_queued_tokens = 0
        """Prompt tokens of requests that have no output yet."""

    @property
    def num_unfinished(self) -> int:
        return len(self._states)

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    def has_unfinished_requests(self) -> bool:
        """Whether a completion is not finished."""
        return self.num_unfinished > 0

    def get_num_queued_tokens(self) -> int:
        return self.num_queued_tokens

    def add(self, group: RequestGroup, requests: Sequence[EngineCoreRequest], now: float) -> None:
        """Register `requests`, the completions of one group; `now` is monotonic, in seconds."""
        states = [self._new_state(group, request, now) for request in requests]
        self._groups[group.internal_id] = group
        self._by_name.setdefault(group.request_id, []).append(group)
        self._states.update((state.handle, state) for state in states)
        self.num_queued_tokens += len(group.prompt_token_ids)

    def begin(self, group: RequestGroup, request: EngineCoreRequest, now: float) -> None:
        """Take in the first part of a prompt that comes in parts; `add` had it without any."""
        self._states[request.handle] = self._new_state(group, request, now)
        self.num_queued_tokens += len(group.prompt_token_ids)

    def process(self, outputs: EngineCoreOutputs) -> Processed:
        """Process a step: a few microseconds per token; FINAL_ONLY has its text decoded later."""
        processed = Processed([], [], [], {})
        stats = self._new_stats(outputs, processed)
        self._note_starts(outputs, stats)
        if outputs.parts:
            self._note_parts(outputs, stats, processed)
        frame = None if outputs.logprobs is None else LogprobFrame(outputs.logprobs)
        ended = {finished.handle: finished for finished in outputs.finished}
        position = 0
        version = outputs.weight_version
        # nearly all engines never change their weights, and their outputs name no version
        is_first = version == FIRST_VERSION
        for handle, ids in _rows(outputs):
            state = self._states.get(handle)
            if isinstance(state, RequestState) and ids:
                if not is_first or state.versions is not None:
                    state.note_version(version)
                end = ended.pop(handle, None) if ended else None
                if stats is not None and state.times is not None:
                    note_tokens(stats, state.times, len(ids), outputs.timestamp)
                self._advance(state, ids, end, frame, position, processed)
            # also for requests that have ended here: the columns still have their tokens
            position += len(ids)
        for end in ended.values():
            state = self._states.get(end.handle)
            if state is not None:
                state.engine_index = outputs.engine_index
                self._end(state, end, processed)
        return processed

    def abort(
        self, ids: Iterable[str], *, internal: bool = False, stop_reason: str | None = None
    ) -> Processed:
        """Abort requests by the caller's ids (every request that has such an id), or by our own.

        Unknown ids are ignored: a request may have finished meanwhile. Returns the final outputs,
        with what was generated and `stop_reason`, and the handles that the core must abort.
        """
        processed = Processed([], [], [], {})
        for request_id in ids:
            for handle in self._handles(request_id, internal):
                state = self._states.get(handle)
                if state is not None:
                    self._abort(state, stop_reason, processed)
        return processed

    def handle_of(self, internal_id: str) -> int | None:
        """The handle of an unfinished request by our own id; None for an unknown one."""
        return next(iter(self._handles(internal_id, internal=True)), None)

    def _handles(self, request_id: str, internal: bool) -> list[int]:
        if not internal:
            namesakes = self._by_name.get(request_id, ())
            return [handle for group in namesakes for handle in group.handles]
        if request_id in self._groups:
            return list(self._groups[request_id].handles)
        index, _, parent = request_id.partition("_")
        group = self._groups.get(parent)
        return (
            [] if group is None or not index.isdecimal() else list(group.handles)[int(index) :][:1]
        )

    def is_unfinished(self, group: RequestGroup) -> bool:
        return group.internal_id in self._groups

    def fail_all(self, error: BaseException) -> None:
        """Fail every request that has a mailbox with `error`, and forget all requests."""
        for group in self._groups.values():
            if group.mailbox is not None:
                group.mailbox.put(error)
            if group.span is not None:
                group.span.end({}, str(error))
        self._states.clear()
        self._groups.clear()
        self._by_name.clear()
        self.num_queued_tokens = 0

    @property
    def request_states(self) -> Mapping[str, RequestGroup]:
        """The requests that are not finished, by our own ids."""
        return MappingProxyType(self._groups)

    def unfinished_ids(self) -> list[str]:
        return list(self._groups)

    def _new_state(self, group: RequestGroup, request: EngineCoreRequest, now: float) -> State:
        params, times = request.params, None
        if self._log_stats:
            times = RequestStateStats(arrival_time=request.arrival_time, queued_ts=now)
        if isinstance(params, PoolingParams):
            return PoolingState(request.handle, group, times)
        tokenizer = self._tokenizer if params.detokenize else None
        wants_logprobs = params.num_logprobs is not None
        prompt = request.prompt_token_ids
        return RequestState(
            request.handle,
            group,
            OutputText(_detokenizer(tokenizer, request.prompt_token_ids, params), params),
            interval=max(self._stream_interval, params.stream_interval or 1),
            logprobs=OutputLogprobs(params, tokenizer) if wants_logprobs else None,
            kept={
                kind.part: kind.keep(params, prompt, tokenizer)
                for kind in self._kinds
                if kind.asked_by is None or getattr(params, kind.asked_by) is not None
            },
            times=times,
            max_tokens=params.max_tokens,
        )

    def _new_stats(self, outputs: EngineCoreOutputs, processed: Processed) -> IterationStats | None:
        if not self._log_stats:
            return None
        stats = IterationStats(time.time(), len(outputs.token_ids))
        processed.stats[outputs.engine_index] = stats
        return stats

    def _note_starts(self, outputs: EngineCoreOutputs, stats: IterationStats | None) -> None:
        for started in outputs.started:
            state = self._states.get(started.handle)
            if state is not None:
                if state.group.num_cached_tokens is None:
                    state.group.num_cached_tokens = started.num_cached_tokens
                self._dequeue(state.group)
                state.engine_index = outputs.engine_index
                if stats is not None and state.times is not None:
                    state.times.scheduled_ts = started.scheduled_time
                    stats.num_prompt_tokens += len(state.group.prompt_token_ids)
                    stats.num_cached_tokens += started.num_cached_tokens

    def _note_parts(
        self, outputs: EngineCoreOutputs, stats: IterationStats | None, processed: Processed
    ) -> None:
        """Give each request its parts; an exception in one fails that request."""
        for part in outputs.parts:
            state = self._states.get(part.handle)
            if state is None:
                continue
            try:
                state.take_part(part)
            except Exception as error:
                self._fail(state, error, processed)
                continue
            if part.comes_at_end and stats is not None and state.times is not None:
                note_tokens(stats, state.times, 0, outputs.timestamp)

    def _end(self, state: State, end: Finished, processed: Processed) -> None:
        if isinstance(state, RequestState):
            self._advance(state, (), end, None, 0, processed)
            return
        output = state.final(end)
        self._forget(state, end, processed)
        _deliver(state.group, output, processed)

    def _advance(
        self,
        state: RequestState,
        ids: Sequence[int],
        end: Finished | None,
        frame: LogprobFrame | None,
        position: int,
        processed: Processed,
    ) -> None:
        """Process one request's part of a step; an exception in it ends this request alone."""
        try:
            is_stop = end is not None and end.reason is FinishReason.STOP
            ends_by_token = is_stop and end is not None and not end.is_in_text
            stop = state.take_in(ids, ends_by_token, frame, position)
            if stop is None and end is None and state.group.mailbox is not None:
                if state.is_due:
                    state.group.mailbox.note(state)
                return
            if stop is not None:
                end = Finished(state.handle, FinishReason.STOP, stop)
                processed.stopped.append(state.handle)
            output = state.partial() if end is None else state.final(end)
        except Exception as error:
            self._fail(state, error, processed)
            return
        if end is not None:
            self._forget(state, end, processed)
        _deliver(state.group, output, processed)

    def _fail(self, state: State, error: Exception, processed: Processed) -> None:
        output = self._failed(state, error)
        self._forget(state, Finished(state.handle, FinishReason.ERROR), processed)
        processed.stopped.append(state.handle)
        _deliver(state.group, output, processed)

    def _abort(self, state: State, stop_reason: str | None, processed: Processed) -> None:
        end = Finished(state.handle, FinishReason.ABORT, stop_reason)
        output: AnyOutput | None
        try:
            output = state.final(end)
        except Exception as error:
            output = self._failed(state, error)
        self._forget(state, end, processed)
        processed.stopped.append(state.handle)
        _deliver(state.group, output, processed)

    def _dequeue(self, group: RequestGroup) -> None:
        if group.is_queued:
            group.is_queued = False
            self.num_queued_tokens -= len(group.prompt_token_ids)

    def _failed(self, state: State, error: Exception) -> AnyOutput | None:
        request_id = state.group.request_id
        logger.error("Request %s failed in the front end.", request_id, exc_info=error)
        return state.failed("the output could not be put together; the engine's log says why")

    def _forget(self, state: State, end: Finished, processed: Processed) -> None:
        del self._states[state.handle]
        processed.ended.append(end.reason)
        group = state.group
        if state.times is not None:
            index = state.engine_index
            # an abort comes between the steps, which have made none then
            if index not in processed.stats:
                processed.stats[index] = IterationStats(time.time())
            _note_end(processed.stats[index], state, end)
        if group.is_finished:
            self._dequeue(group)
            del self._groups[group.internal_id]
            namesakes = self._by_name[group.request_id]
            namesakes.remove(group)
            if not namesakes:
                del self._by_name[group.request_id]


def _detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
) -> IncrementalDetokenizer | None:
    if tokenizer is None:
        return None
    return IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _deliver(group: RequestGroup, output: AnyOutput | None, processed: Processed) -> None:
    if output is None:
        return
    if group.mailbox is None:
        processed.outputs.append(output)
    else:
        group.mailbox.put(output)


def _rows(outputs: EngineCoreOutputs) -> Iterable[tuple[int, Sequence[int]]]:
    if outputs.counts is None:
        return zip(outputs.handles, zip(outputs.token_ids, strict=True), strict=True)
    return _ragged_rows(outputs.handles, outputs.counts, outputs.token_ids)


def _ragged_rows(
    handles: list[int], counts: list[int], token_ids: list[int]
) -> Iterable[tuple[int, Sequence[int]]]:
    start = 0
    for handle, count in zip(handles, counts, strict=True):
        yield handle, token_ids[start : start + count]
        start += count


def _note_end(stats: IterationStats, state: State, end: Finished) -> None:
    group = state.group
    assert state.times is not None
    ended = finished_stats(
        state.times,
        end,
        stats.iteration_timestamp,
        num_prompt_tokens=len(group.prompt_token_ids),
        num_cached_tokens=group.num_cached_tokens or 0,
        max_tokens=state.max_tokens,
    )
    stats.finished_requests.append(ended)
    group.num_generated += ended.num_generation_tokens
    group.num_longest = max(group.num_longest, ended.num_generation_tokens)
    if group.is_finished:
        stats.n_params_iter.append(len(group.handles))
        stats.max_num_generation_tokens_iter.append(group.num_longest)
        if group.span is not None:
            end_span(group, group.span, end, ended, state.times)
