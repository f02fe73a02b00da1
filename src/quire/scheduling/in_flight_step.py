"""A step between `schedule()` and `update()`: what was asked of the runner, and what no longer
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quire.scheduling.decode_lane import Cohort
from quire.scheduling.request import Request
from quire.scheduling.step import NewBlocks


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """`count` tokens of a request up to position `end`; `samples` when they reach its last known
    token.
    """

    request: Request
    row: int
    count: int
    end: int
    samples: bool


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step in flight."""

    step_id: int
    cohort: Cohort | None = None
    chunks: dict[int, ScheduledChunk] = field(default_factory=dict)
    """By handle, in the order of the plan."""
    new_blocks: dict[int, list[NewBlocks]] = field(default_factory=dict)
    ending: dict[int, Request] = field(default_factory=dict)
    """Members of the lane whose last token this step samples."""
    cancelled: set[int] = field(default_factory=set)
    """Handles whose results in this step no longer count."""
    has_preempted: bool = False

    @property
    def num_chunk_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks.values())

    def failed(self, errors: Mapping[int, str]) -> dict[int, str]:
        """handle -> what went wrong, for rows of this step whose request still counts."""
        handles = {chunk.row: handle for handle, chunk in self.chunks.items()}
        if self.cohort is not None:
            handles |= dict(zip(self.cohort.rows, self.cohort.handles, strict=True))
        named = {handles[row]: text for row, text in errors.items()}
        return {handle: text for handle, text in named.items() if handle not in self.cancelled}

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
