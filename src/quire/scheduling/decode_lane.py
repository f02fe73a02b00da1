"""The requests that decode: each takes one token in every step, and nobody looks at it until
something is due.

The lane keeps a clock that ticks once a step. A request at position p when it joins at tick t is
at position p + (t' - t) at tick t', so its next block boundary and its last token are known ticks,
kept in a calendar. A steady step therefore costs the scheduler nothing per request.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.scheduling.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The lane's members in one or more consecutive steps, as parallel lists that nobody
    changes.
    """

    rows: list[int]
    handles: list[int]
    requests: list[Request]
    outputs: list[list[int]]
    """Each member's own list of output ids, where new ones are appended."""
    inspected: list[Request]
    """Members whose stop condition must be looked at after every token."""


class DecodeLane:
    """Invariants: a member's due tick is not in the past, and is in the calendar."""

    def __init__(self, block_size: int) -> None:
        self.tick = 0
        self.members: dict[int, Request] = {}
        self._block_size = block_size
        self._calendar: dict[int, list[Request]] = {}
        self._cohort: Cohort | None = None

    def __contains__(self, request: Request) -> bool:
        return self.members.get(request.row) is request

    def join(self, request: Request) -> None:
        """From the next step on the request takes one token a step, starting at its first
        uncomputed token.
        """
        position = request.num_computed_tokens
        request.lane_offset = position - self.tick
        self.members[request.row] = request
        self._cohort = None
        self._enter_calendar(request, position)

    def leave(self, request: Request) -> None:
        """Take a member out; its count of computed tokens is exact again."""
        request.num_computed_tokens = self.position(request)
        request.due = -1
        del self.members[request.row]
        self._cohort = None

    def position(self, request: Request) -> int:
        """The token that the member computes at the present tick."""
        return self.tick + request.lane_offset

    def due(self) -> list[Request]:
        """Members for which this tick is a block boundary or the last token. Reading them takes
        them off the calendar.
        """
        due = self._calendar.pop(self.tick, ())
        return [request for request in due if request.due == self.tick and request in self]

    def reschedule(self, request: Request) -> None:
        """Put a member whose event was handled back into the calendar."""
        self._enter_calendar(request, self.position(request) + 1)

    def cohort(self) -> Cohort | None:
        """The present members; None when there are none."""
        if self._cohort is None and self.members:
            requests = list(self.members.values())
            self._cohort = Cohort(
                rows=list(self.members),
                handles=[request.handle for request in requests],
                requests=requests,
                outputs=[request.output_token_ids for request in requests],
                inspected=[
                    r for r in requests if r.params.repetition_detection or r.grammar is not None
                ],
            )
        return self._cohort

    def advance(self) -> None:
        """A step was scheduled: every member moved on by one token."""
        self.tick += 1

    def _enter_calendar(self, request: Request, position: int) -> None:
        boundary = -(-position // self._block_size) * self._block_size
        due = min(boundary, max(position, request.max_total_tokens - 2)) - request.lane_offset
        request.due = due
        self._calendar.setdefault(due, []).append(request)
