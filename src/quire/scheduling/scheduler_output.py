"""What a step brought, as columns: parallel lists that the engine core passes on without looking
at each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from quire.scheduling.in_flight_step import InFlightStep
from quire.scheduling.request import Reason, Request
from quire.scheduling.step import StepResult


@dataclass(slots=True)
class FinishedRequest:
    """A request's final state; `message` says what went wrong when the reason is ERROR, `fault` is
    for the log. `is_in_text`: its last token belongs to its text although it stopped.
    """

    handle: int
    reason: Reason
    stop_reason: int | str | None = None
    message: str | None = None
    fault: Exception | None = None
    num_preemptions: int = 0
    is_in_text: bool = False


@dataclass(slots=True)
class StartedRequest:
    """A request has its first output."""

    handle: int
    num_cached_tokens: int
    scheduled_time: float


@dataclass(slots=True)
class SchedulerOutput:
    """`requests[i]` got `token_ids[i]`, which is in its output already.

    `kept[i]` is its place among the step's sampled rows (None: all of them, in order), for whoever
    has more columns to cut.
    """

    requests: Sequence[Request] = ()
    handles: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    kept: list[int] | None = None
    finished: list[FinishedRequest] = field(default_factory=list)
    started: list[StartedRequest] = field(default_factory=list)


def collect_outputs(
    step: InFlightStep, result: StepResult, *, dropped: Collection[int]
) -> SchedulerOutput:
    """Append the step's ids to their requests' outputs; columns without the `dropped` handles."""
    requests, handles, outputs = _sampled(step)
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


def _sampled(step: InFlightStep) -> tuple[list[Request], list[int], list[list[int]]]:
    """The requests of the step's sampled rows with their handles and output lists, not copied in a
    steady step.
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
