"""A step between `schedule()` and `update()`: what was asked of the runner, and which results are
cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quire.scheduling.decode_lane import Cohort
from quire.scheduling.request import Request
from quire.scheduling.step import Chunk, NewBlocks


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
        """The chunk as the runner gets it."""
        return Chunk(self.row, self.count + self.num_drafts, self.samples, self.num_drafts)


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step in flight."""

    step_id: int
    cohort: Cohort | None = None
    cohort_drafts: list[int] | None = None
    """Of each member of the cohort; None: none."""
    chunks: dict[int, ScheduledChunk] = field(default_factory=dict)
    """By handle, in the order of the plan."""
    new_blocks: dict[int, list[NewBlocks]] = field(default_factory=dict)
    ending: dict[int, Request] = field(default_factory=dict)
    """Members of the lane to which this step may bring their last token."""
    cancelled: set[int] = field(default_factory=set)
    """Handles whose results in this step no longer count."""
    has_preempted: bool = False

    def failed(self, errors: Mapping[int, str]) -> dict[int, str]:
        """handle -> what went wrong, for rows of this step whose request still counts."""
        handles = {chunk.row: handle for handle, chunk in self.chunks.items()}
        if self.cohort is not None:
            handles |= dict(zip(self.cohort.rows, self.cohort.handles, strict=True))
        named = {handles[row]: text for row, text in errors.items()}
        return {handle: text for handle, text in named.items() if handle not in self.cancelled}

    def asked_drafts(self) -> list[tuple[Request, int]]:
        """The requests of the sampled rows, in order, with their drafts."""
        asked: list[tuple[Request, int]] = []
        if self.cohort is not None:
            requests = self.cohort.requests
            drafts = self.cohort_drafts or [0] * len(requests)
            asked = list(zip(requests, drafts, strict=True))
        return asked + [(c.request, c.num_drafts) for c in self.chunks.values() if c.samples]

    def forget(self, handle: int) -> None:
        """The request lost its row while the step was being planned."""
        for part in (self.chunks, self.new_blocks, self.ending):
            part.pop(handle, None)  # type: ignore[attr-defined]


def handles_of(steps: Sequence[InFlightStep]) -> Collection[int]:
    """The requests in these steps, one at least; in steady decode the same list every time."""
    cohort = steps[-1].cohort
    if cohort is not None and not any(s.chunks or s.cohort is not cohort for s in steps):
        return cohort.handles
    found: dict[int, None] = {}
    for step in steps:
        found |= dict.fromkeys(step.cohort.handles if step.cohort else ())
        found |= dict.fromkeys(step.chunks)
    return found.keys()
