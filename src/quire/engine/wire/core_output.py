"""`EngineCoreOutput`: what a step gave one request, by the reference's names. A program reads it
from the columns that a core sends, or makes it and has columns made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from quire.engine.wire.output_parts import (
    EngineCoreEvent,
    EngineCoreEventType,
    Finished,
    FinishReason,
    Started,
)
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.step.columns import DOCUMENTED_PARTS, AnyPart, LogprobColumns, PromptLogprobs


@dataclass(slots=True)
class EngineCoreOutput:
    """The output of a step for one request: the new ids, and its end where `finish_reason` is set.
    What a program makes may be part of an `EngineCoreOutputs`.

    `request_id` is the text of the request's handle: names stay in the front end. `index` of
    `new_logprobs` counts the new ids. `pooling_output` comes with the end of a pooling request. Of
    `events` a request's first output has that it was queued and scheduled, and what the prefix
    cache gave; its last that it was preempted. `routed_experts`: [n, L, k]. `num_nans_in_logits`
    comes with the error that it causes; where the logits are on a GPU it is 1, whatever the number.
    Raises NotBuiltYet for a value of what this release does not have.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobColumns | None = None
    new_prompt_logprobs_tensors: PromptLogprobs | None = None
    pooling_output: np.ndarray[Any, np.dtype[np.float32]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    _: KW_ONLY
    num_cached_tokens: int = 0
    routed_experts: np.ndarray[Any, np.dtype[np.int16]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: None = None
    new_sampling_mask: None = None
    spec_decode_metrics: None = None
    prompt_token_id_logprobs: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def __post_init__(self) -> None:
        for name in _UNBUILT:
            if getattr(self, name):
                raise NotBuiltYet(name, getattr(self, name), "Leave it out.")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidType(name, value, f"it must be a {kind.__name__}")
        if not all(isinstance(event, EngineCoreEvent) for event in self.events or ()):
            raise InvalidType("events", self.events, "it must be a list of EngineCoreEvent")

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None

    @property
    def new_prompt_logprobs(self) -> PromptLogprobs | None:
        """`new_prompt_logprobs_tensors`."""
        return self.new_prompt_logprobs_tensors


_UNBUILT = (
    *("ec_transfer_params", "trace_headers", "prefill_stats"),
    *("mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics"),
)
_KINDS = {
    "request_id": str,
    "new_logprobs": LogprobColumns,
    "new_prompt_logprobs_tensors": PromptLogprobs,
    "events": list,
    "kv_transfer_params": dict,
}


class Columns(Protocol):
    """The columns of `EngineCoreOutputs`."""

    handles: list[int]
    token_ids: list[int]
    counts: list[int] | None
    finished: list[Finished]
    started: list[Started]
    logprobs: LogprobColumns | None
    parts: list[AnyPart]
    names: dict[int, str]


# from columns


def outputs_of(columns: Columns) -> Iterator[EngineCoreOutput]:
    """One output for each request of `handles`, then for those that ended without new ids."""
    ends = {end.handle: end for end in columns.finished}
    counts: Sequence[int] = columns.counts or [1] * len(columns.handles)
    start = 0
    for handle, count in zip(columns.handles, counts, strict=True):
        yield _output_of(columns, handle, ends.pop(handle, None), start, count)
        start += count
    for handle, end in ends.items():
        yield _output_of(columns, handle, end, start, 0)


def _output_of(
    columns: Columns, handle: int, end: Finished | None, start: int, count: int
) -> EngineCoreOutput:
    begin = next((s for s in columns.started if s.handle == handle), None)
    parts: dict[str, Any] = {
        part.documented: part.value
        for part in reversed(columns.parts)
        if part.handle == handle and part.documented is not None
    }
    own = {start + place: place for place in range(count)}
    return EngineCoreOutput(
        request_id=columns.names.get(handle, str(handle)),
        new_token_ids=columns.token_ids[start : start + count],
        new_logprobs=None if columns.logprobs is None else columns.logprobs.at(own),
        finish_reason=None if end is None else end.reason,
        stop_reason=None if end is None else end.stop_reason,
        events=_events(begin, end) or None,
        num_cached_tokens=0 if begin is None else begin.num_cached_tokens,
        num_nans_in_logits=0 if end is None else end.num_nans_in_logits,
        **parts,
    )


def _events(begin: Started | None, end: Finished | None) -> list[EngineCoreEvent]:
    kind, found = EngineCoreEventType, []
    if begin is not None:
        found.append(EngineCoreEvent(kind.QUEUED, begin.queued_time))
        found.append(EngineCoreEvent(kind.SCHEDULED, begin.scheduled_time))
    times = () if end is None else end.preempted_times
    return found + [EngineCoreEvent(kind.PREEMPTED, time) for time in times]


# to columns


def columns_of(
    outputs: Iterable[EngineCoreOutput] | None, finished_requests: Iterable[str] | None
) -> dict[str, Any]:
    """The columns, by name, of outputs that a program made; of `finished_requests` those without an
    output were aborted. Ids that are not handles become negative ones, whose `names` they are.
    """
    made, names = list(outputs or ()), _Names()
    for output in made:
        if not output.finished and _times(output, EngineCoreEventType.PREEMPTED):
            allowed = "that a request was preempted comes with its end"
            raise InvalidParameter("events", output.events, allowed)
        if not output.finished and output.num_nans_in_logits:
            allowed = "they end a request with an error"
            raise InvalidParameter("num_nans_in_logits", output.num_nans_in_logits, allowed)
    handles = [names.handle_of(output.request_id) for output in made]
    named = list(zip(handles, made, strict=True))
    gone = {names.handle_of(name) for name in finished_requests or ()} - {*handles}
    aborted = [Finished(handle, FinishReason.ABORT) for handle in sorted(gone)]
    return {
        "handles": handles,
        "token_ids": [*chain.from_iterable(output.new_token_ids for output in made)],
        "counts": [len(output.new_token_ids) for output in made],
        "finished": [_end(*each) for each in named if each[1].finished] + aborted,
        "started": [*filter(None, (_begin(*each) for each in named))],
        "logprobs": _joined(made),
        "parts": [
            kind.of_value(handle, getattr(output, field))
            for field, kind in DOCUMENTED_PARTS.items()
            for handle, output in named if getattr(output, field) is not None
        ],
        "names": {handle: name for name, handle in names.given.items()},
    }  # fmt: skip


class _Names:
    """Handles for the ids of one message's requests."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def handle_of(self, name: str) -> int:
        if name.isdecimal() and name == str(int(name)):
            return int(name)
        return self.given.setdefault(name, -1 - len(self.given))


def _end(handle: int, output: EngineCoreOutput) -> Finished:
    assert output.finish_reason is not None
    reason = FinishReason(output.finish_reason)
    message = "the core reports an error" if reason is FinishReason.ERROR else None
    times = _times(output, EngineCoreEventType.PREEMPTED)
    return Finished(
        handle,
        reason,
        output.stop_reason,
        message,
        len(times),
        preempted_times=times,
        num_nans_in_logits=output.num_nans_in_logits,
    )


def _begin(handle: int, output: EngineCoreOutput) -> Started | None:
    """The beginning that its events tell; without any it is now, if tokens were cached."""
    queued = _times(output, EngineCoreEventType.QUEUED)
    scheduled = _times(output, EngineCoreEventType.SCHEDULED)
    if not (queued or scheduled or output.num_cached_tokens):
        return None
    if len(queued) > 1 or len(queued) != len(scheduled):
        raise InvalidParameter("events", output.events, "a request is queued and scheduled once")
    [when], [since] = scheduled or [time.monotonic()], queued or [time.monotonic()]
    return Started(handle, output.num_cached_tokens, when, since)


def _times(output: EngineCoreOutput, kind: EngineCoreEventType) -> list[float]:
    return [event.timestamp for event in output.events or () if event.type == kind]


def _joined(outputs: Sequence[EngineCoreOutput]) -> LogprobColumns | None:
    """The log-probabilities of all outputs, as wide as the widest."""
    starts = np.cumsum([0, *(len(output.new_token_ids) for output in outputs)]).tolist()
    found = [
        (start, output.new_logprobs)
        for start, output in zip(starts, outputs, strict=False) if output.new_logprobs is not None
    ]  # fmt: skip
    if not found:
        return None
    width = max(columns.token_ids.shape[1] for _, columns in found)

    def stacked(name: str, padding: int) -> Any:
        each = [getattr(columns, name) for _, columns in found]
        wide = [((0, 0), (0, width - array.shape[1])) for array in each]
        return np.concatenate(
            [np.pad(a, w, constant_values=padding) for a, w in zip(each, wide, strict=True)]
        )

    return LogprobColumns(
        index=[start + at for start, columns in found for at in columns.index],
        token_ids=stacked("token_ids", -1),
        values=stacked("values", 0),
        ranks=np.concatenate([columns.ranks for _, columns in found]),
        counts=[count for _, columns in found for count in columns.counts],
    )


def give_handles(columns: Columns, find: Callable[[str], int | None]) -> None:
    """Put handles that `find` knows in place of those that stand for names, negative ones."""
    known = {old: find(name) for old, name in columns.names.items() if old < 0}
    handles = {old: new for old, new in known.items() if new is not None}
    columns.handles = [handles.get(handle, handle) for handle in columns.handles]
    parts: Iterable[Any] = chain(columns.finished, columns.started, columns.parts)
    for part in parts:
        part.handle = handles.get(part.handle, part.handle)
    columns.names = {handles.get(old, old): name for old, name in columns.names.items()}
