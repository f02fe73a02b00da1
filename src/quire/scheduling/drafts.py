"""Applies what a result reports about drafts: how many were wrong, how many are ready now."""

from __future__ import annotations

from collections.abc import Collection

from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.lifecycle import Counters
from quire.scheduling.scheduler_output import InFlightStep
from quire.scheduling.step import StepResult


def verified_drafts(
    step: InFlightStep, result: StepResult, gone: Collection[int]
) -> list[tuple[int, int, int]]:
    """Return (handle, drafts, how many of them were right) of the requests that verified some."""
    requests, asked = step.asked_drafts()
    rows = zip(requests, asked, result.counts or [1] * len(asked), strict=True)
    return [
        (request.handle, drafts, count - 1)
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
    """Roll the requests of a step back to the end of their accepted drafts, count these, and note
    the drafts that are ready. The handles in `gone` are ignored.
    """
    num_accepted, members = counters.num_accepted, lane.members
    requests, asked = step.asked_drafts()
    counts = result.counts or [1] * len(asked)
    ready = result.num_drafts or [0] * len(asked)
    assert max(ready, default=0) < lane.stride, "there are more drafts than were requested"
    for request, drafts, count, num_drafts in zip(requests, asked, counts, ready, strict=True):
        if gone and request.handle in gone:
            continue
        request.num_drafts = num_drafts
        if not drafts:
            continue
        wrong = drafts + 1 - count
        assert 0 <= wrong <= drafts, "a row gets its right drafts and one token more"
        counters.num_drafts += drafts
        num_accepted[count - 1] += 1
        request.num_drafts_in_flight -= drafts
        if not wrong:
            continue
        if members.get(request.row) is request:
            lane.roll_back(request, wrong)
        else:
            request.num_computed_tokens -= wrong
