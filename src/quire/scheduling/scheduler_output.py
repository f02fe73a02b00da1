"""A step between `schedule()` and `update()`, and the scheduler's output for its result.

`InFlightStep` is what was sent to the runner, and which results are cancelled. `SchedulerOutput`
has columns: parallel lists that the engine core passes on without visiting each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from quire.scheduling.decode_lane import Cohort
from quire.scheduling.request import Reason, Request, Stop
from quire.step.part import VerifiedDrafts
from quire.step.plan import Chunk, NewBlocks
from quire.step.result import StepResult


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """`count` tokens of a request up to position `end`, and `num_drafts` drafts after them;
    `samples` when they include its last known token.
    """

    request: Request
    row: int
    count: int
    end: int
    samples: bool
    num_drafts: int = 0

    def message(self) -> Chunk:
        """The chunk in the form that is sent to the runner."""
        return Chunk(self.row, self.count + self.num_drafts, self.samples, self.num_drafts)


class Failure(NamedTuple):
    """Failure of a request. `num_nans`: number of NaN among its logits, if that is why; `fault`:
    the exception for the log.
    """

    text: str
    num_nans: int = 0
    fault: Exception | None = None


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step in flight."""

    step_id: int
    cohort: Cohort | None = None
    cohort_drafts: list[int] | None = None
    """The number of drafts of each member of the cohort; None: no drafts."""
    chunks: dict[int, ScheduledChunk] = field(default_factory=dict)
    """The chunks by handle, in the order of the plan."""
    new_blocks: dict[int, list[NewBlocks]] = field(default_factory=dict)
    ending: dict[int, Request] = field(default_factory=dict)
    """Members of the lane that may get their last token in this step."""
    cancelled: set[int] = field(default_factory=set)
    """Handles whose results in this step no longer count."""
    has_preempted: bool = False
    planned_at: float = 0.0
    """Time of the plan, by the clock of `Scheduler.schedule`."""

    def failed(self, result: StepResult) -> dict[int, Failure]:
        """Return the failures of this step's rows by handle, of those that are not cancelled."""
        if not result.errors:
            return {}
        handles = {chunk.row: handle for handle, chunk in self.chunks.items()}
        if self.cohort is not None:
            handles |= dict(zip(self.cohort.rows, self.cohort.handles, strict=True))
        named = {
            handles[row]: Failure(text, result.nans.get(row, 0))
            for row, text in result.errors.items()
        }
        return {handle: found for handle, found in named.items() if handle not in self.cancelled}

    def asked_drafts(self) -> tuple[Sequence[Request], Sequence[int]]:
        """The requests of the sampled rows, in order, and how many drafts each verifies."""
        requests: Sequence[Request] = ()
        drafts: Sequence[int] = ()
        if self.cohort is not None:
            requests = self.cohort.requests
            drafts = self.cohort_drafts or [0] * len(requests)
        if sampling := [chunk for chunk in self.chunks.values() if chunk.samples]:
            requests = [*requests, *(chunk.request for chunk in sampling)]
            drafts = [*drafts, *(chunk.num_drafts for chunk in sampling)]
        return requests, drafts

    def forget(self, handle: int) -> None:
        """Remove a request that lost its row while the step was being planned."""
        for part in (self.chunks, self.new_blocks, self.ending):
            part.pop(handle, None)  # type: ignore[attr-defined]


def handles_of(steps: Sequence[InFlightStep]) -> Collection[int]:
    """The requests in these steps (at least one); in steady decode always the same list."""
    cohort = steps[-1].cohort
    if cohort is not None and not any(s.chunks or s.cohort is not cohort for s in steps):
        return cohort.handles
    found: dict[int, None] = {}
    for step in steps:
        found |= dict.fromkeys(step.cohort.handles if step.cohort else ())
        found |= dict.fromkeys(step.chunks)
    return found.keys()


@dataclass(slots=True)
class FinishedRequest:
    """A request's final state. With reason ERROR, `message` is the error text and `fault` the
    exception for the log. `is_in_text`: its last token belongs to its text although it stopped.
    `num_nans`: how many of its logits are NaN.
    """

    handle: int
    reason: Reason
    stop_reason: int | str | None = None
    message: str | None = None
    fault: Exception | None = None
    num_preemptions: int = 0
    is_in_text: bool = False
    preempted_times: Sequence[float] = ()
    num_nans: int = 0


class StartedRequest(NamedTuple):
    """A request that has just got its first output; its fields are those of `Started`."""

    handle: int
    num_cached_tokens: int
    scheduled_time: float
    queued_time: float = 0.0
    adapter: int = 0


@dataclass(slots=True)
class SchedulerOutput:
    """The new tokens of a step: `requests[i]` got `counts[i]` of the flat `token_ids` (None: one
    each), which are already in its output.

    `kept[j]` is the place of the j-th token id among those of the step's result (None: all of
    them, in order), to cut other columns alike. `parts` tells what became of drafts, where that is
    wanted.
    """

    requests: Sequence[Request] = ()
    handles: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    counts: list[int] | None = None
    kept: list[int] | None = None
    finished: list[FinishedRequest] = field(default_factory=list)
    started: list[StartedRequest] = field(default_factory=list)
    parts: list[VerifiedDrafts] = field(default_factory=list)

    def num_new(self) -> dict[int, int]:
        """The number of new tokens by handle, for those that do not have exactly one."""
        return {} if self.counts is None else dict(zip(self.handles, self.counts, strict=True))

    def drop_last(self, handle: int, count: int) -> None:
        """Remove the last `count` new tokens of a request from the columns."""
        assert self.counts is not None, "one token is never dropped"
        if self.kept is None:
            self.kept = list(range(len(self.token_ids)))
        place = self.handles.index(handle)
        end = sum(self.counts[: place + 1])
        self.token_ids = [*self.token_ids[: end - count], *self.token_ids[end:]]
        del self.kept[end - count : end]
        self.counts[place] -= count


def finished_request(request: Request, stop: Stop) -> FinishedRequest:
    """The final state of a request that stopped."""
    return FinishedRequest(
        request.handle,
        stop.reason,
        stop.what,
        num_preemptions=request.num_preemptions,
        is_in_text=stop.is_in_text,
        preempted_times=request.preempted_times,
    )


def append_tokens(
    step: InFlightStep, result: StepResult, *, dropped: Collection[int]
) -> SchedulerOutput:
    """Append the step's ids to the requests' outputs; return columns without `dropped` handles."""
    requests, handles, outputs = _sampled(step)
    if result.counts is not None and result.counts.count(1) < len(requests):
        return _append_ragged(requests, handles, outputs, result, dropped)
    token_ids, kept = result.token_ids, None
    assert len(token_ids) == len(requests), "one id for each sampled row"
    if dropped:
        kept = [i for i, handle in enumerate(handles) if handle not in dropped]
        requests = [requests[i] for i in kept]
        handles = [handles[i] for i in kept]
        outputs = [outputs[i] for i in kept]
        token_ids = [token_ids[i] for i in kept]
    deque(map(list.append, outputs, token_ids), maxlen=0)  # a loop in C
    return SchedulerOutput(requests, handles, token_ids, kept=kept)


def _append_ragged(
    requests: Sequence[Request],
    handles: Sequence[int],
    outputs: Sequence[list[int]],
    result: StepResult,
    dropped: Collection[int],
) -> SchedulerOutput:
    counts, token_ids = result.counts, result.token_ids
    assert counts is not None and len(counts) == len(requests), "one count for each sampled row"
    assert sum(counts) == len(token_ids), "the counts are those of the ids"
    kept = None
    if dropped:
        ends = list(accumulate(counts, initial=0))
        rows = [i for i, handle in enumerate(handles) if handle not in dropped]
        kept = [place for i in rows for place in range(ends[i], ends[i + 1])]
        requests, outputs = [requests[i] for i in rows], [outputs[i] for i in rows]
        handles = [handles[i] for i in rows]
        counts, token_ids = [counts[i] for i in rows], [token_ids[place] for place in kept]
    start = 0
    for output, count in zip(outputs, counts, strict=True):
        output += token_ids[start : start + count]
        start += count
    return SchedulerOutput(requests, handles, token_ids, counts=list(counts), kept=kept)


def _sampled(step: InFlightStep) -> tuple[list[Request], list[int], list[list[int]]]:
    """Return the requests of the step's sampled rows, their handles and output lists; not copied in
    a steady step.
    """
    chunked = [chunk.request for chunk in step.chunks.values() if chunk.samples]
    cohort = step.cohort
    if cohort is None:
        requests: list[Request] = []
        handles: list[int] = []
        outputs: list[list[int]] = []
    else:
        requests, handles, outputs = cohort.requests, cohort.handles, cohort.outputs
    if chunked:
        requests = [*requests, *chunked]
        handles = [*handles, *(request.handle for request in chunked)]
        outputs = [*outputs, *(request.output_token_ids for request in chunked)]
    return requests, handles, outputs
