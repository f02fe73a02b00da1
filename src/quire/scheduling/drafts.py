"""Applies what a result reports about drafts: how many were wrong, how many are ready now."""

from __future__ import annotations

from collections.abc import Collection

from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.lifecycle import Counters
from quire.scheduling.scheduler_output import InFlightStep
from quire.scheduling.step import StepResult


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
    num_accepted = counters.num_accepted
    asked = step.asked_drafts()
    counts = result.counts or [1] * len(asked)
    ready = result.num_drafts or [0] * len(asked)
    for (request, drafts), count, num_drafts in zip(asked, counts, ready, strict=True):
        if request.handle in gone:
            continue
        assert 1 <= count <= drafts + 1 and num_drafts < lane.stride, "more than was requested"
        request.num_drafts = num_drafts
        request.num_drafts_in_flight -= drafts
        wrong = drafts + 1 - count
        if drafts:
            counters.num_drafts += drafts
            num_accepted[count - 1] += 1
        if request in lane:
            lane.roll_back(request, wrong)
        else:
            request.num_computed_tokens -= wrong
