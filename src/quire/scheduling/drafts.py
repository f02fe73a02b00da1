"""Applies what a result reports about drafts: how many were wrong, how many are ready now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from operator import sub

from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.lifecycle import Counters
from quire.scheduling.scheduler_output import InFlightStep
from quire.step.part import VerifiedDrafts
from quire.step.result import StepResult


def verified_drafts(
    step: InFlightStep, result: StepResult, gone: Collection[int]
) -> list[VerifiedDrafts]:
    """Return the drafts of the requests that verified some."""
    requests, asked = step.asked_drafts()
    rows = zip(requests, asked, result.counts or [1] * len(asked), strict=True)
    return [
        VerifiedDrafts(request.handle, drafts, count - 1)
        for request, drafts, count in rows
        if drafts and request.handle not in gone
    ]


def record_drafts(
    step: InFlightStep,
    result: StepResult,
    lane: DecodeLane,
    gone: Collection[int],
    counters: Counters,
) -> None:
    """Note the drafts that are ready, take those of the step out of flight, and count the accepted
    ones. The handles in `gone` are ignored.
    """
    requests, asked = step.asked_drafts()
    counts: Sequence[int] = result.counts or [1] * len(asked)
    ready: Sequence[int] = result.num_drafts or [0] * len(asked)
    assert max(ready, default=0) < lane.stride, "there are more drafts than were requested"
    if gone:
        kept = [place for place, request in enumerate(requests) if request.handle not in gone]
        requests = [requests[place] for place in kept]
        asked, counts, ready = ([c[place] for place in kept] for c in (asked, counts, ready))
    for request, num_drafts, drafts in zip(requests, ready, asked, strict=True):
        request.num_drafts = num_drafts
        request.num_drafts_in_flight -= drafts
    if not any(asked):
        return
    _count(asked, counts, counters)
    if step.chunks or not lane.is_current(step.cohort):
        for request, drafts, count in zip(requests, asked, counts, strict=True):
            # members of the lane are counted by the lane itself
            if drafts and request not in lane:
                request.num_computed_tokens -= drafts + 1 - count


def _count(asked: Sequence[int], counts: Sequence[int], counters: Counters) -> None:
    """Count the drafts of the rows that verified some; `counts` are the tokens that each row
    got.
    """
    is_right = min(counts) >= 1 and max(map(sub, counts, asked)) <= 1
    assert is_right, "a row gets its right drafts and one token more"
    counters.num_drafts += sum(asked)
    for count, times in Counter(counts).items():
        counters.num_accepted[count - 1] += times
    counters.num_accepted[0] -= asked.count(0)
