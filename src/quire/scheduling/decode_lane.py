"""The decoding requests: each takes a token in every step, plus drafts if it has any, and costs the
scheduler nothing until something is due.

The lane keeps a clock that ticks once per step. Without drafts a request at position p when it
joins at tick t is at position p + (t' - t) at tick t', so its next block boundary and its last
token are known ticks, kept in a calendar. A steady step therefore costs the scheduler nothing per
request.

With up to K drafts a step may take a request 1 .. K+1 tokens further, and while steps are in flight
its position is known only between two bounds. The clock counts K+1 tokens per tick; when a plan or
a result has fewer, the difference is rolled back, so that the clock gives the upper bound. An event
is therefore never late; one that is early is put back into the calendar. Blocks are allocated up to
the upper bound, and released by the lower bound once no query reads them any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.scheduling.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The lane's members in one or more consecutive steps, as parallel lists that are never
    modified.
    """

    rows: list[int]
    handles: list[int]
    requests: list[Request]
    outputs: list[list[int]]
    """Each member's own list of output ids, where new ones are appended."""
    inspected: list[Request]
    """Members whose stop condition must be checked after every token."""


class DecodeLane:
    """Invariants: a member's due tick is not in the past, and is in the calendar."""

    def __init__(self, num_drafts: int = 0) -> None:
        """num_drafts: the most drafts of a member in a step."""
        self.tick = 0
        self.members: dict[int, Request] = {}
        self.stride = num_drafts + 1
        """The most tokens that a member may advance in a tick."""
        self._calendar: dict[int, list[Request]] = {}
        self._cohort: Cohort | None = None

    def __contains__(self, request: Request) -> bool:
        return self.members.get(request.row) is request

    def join(self, request: Request) -> None:
        """Add a request, which takes tokens in every step from the next one on, starting at its
        first uncomputed one.
        """
        request.lane_offset = request.num_computed_tokens - self.tick * self.stride
        self.members[request.row] = request
        self._cohort = None
        self._enter_calendar(request, self.tick)

    def leave(self, request: Request) -> None:
        """Remove a member; from now on it counts its computed tokens itself."""
        request.num_computed_tokens = self.position(request)
        request.due = -1
        del self.members[request.row]
        self._cohort = None

    def position(self, request: Request) -> int:
        """The first token that the member computes at the present tick, if all its drafts in
        flight are right; with `num_drafts_in_flight` subtracted, if all are wrong.
        """
        return self.tick * self.stride + request.lane_offset

    def due(self) -> list[Request]:
        """Remove from the calendar, and return, the members for which this tick may be a block
        boundary or the last token.
        """
        due = self._calendar.pop(self.tick, ())
        return [request for request in due if request.due == self.tick and request in self]

    def reschedule(self, request: Request) -> None:
        """Put a member back into the calendar after its event was handled."""
        self._enter_calendar(request, self.tick + 1)

    def cohort(self) -> Cohort | None:
        """The current members; None if the lane is empty."""
        if self._cohort is None and self.members:
            requests = list(self.members.values())
            self._cohort = Cohort(
                rows=list(self.members),
                handles=[request.handle for request in requests],
                requests=requests,
                outputs=[request.output_token_ids for request in requests],
                inspected=[
                    r for r in requests if r.sampling.repetition_detection or r.grammar is not None
                ],
            )
        return self._cohort

    def plan_drafts(self, most: int) -> list[int] | None:
        """Return how many drafts each member verifies at this tick, at most `most` in all; None: no
        member verifies any.

        A member verifies as many as are ready, within its blocks and its maximum length; with a
        step in flight, as many as the last result reported, which is what the next one will report
        as long as its drafts are right.
        """
        if self.stride == 1:
            return None
        counts, most_of_one = [], self.stride - 1
        for request in self.members.values():
            count = request.num_drafts if request.takes_drafts else 0
            if count:
                position = self.position(request)
                left = request.max_total_tokens - position - 2
                count = min(count, most, request.capacity - position - 1, left)
                if count > 0:
                    most -= count
                    request.num_drafts_in_flight += count
                else:
                    count = 0
            request.lane_offset -= most_of_one - count
            counts.append(count)
        return counts if any(counts) else None

    def advance(self) -> None:
        """Tick: after a planned step every member may have advanced by `stride` tokens."""
        self.tick += 1

    def roll_back(self, request: Request, count: int) -> None:
        """Move a member back by `count` tokens that a step could have given it but did not."""
        request.lane_offset -= count

    def _enter_calendar(self, request: Request, earliest: int) -> None:
        """Schedule the member's event: the first tick at which its tokens may exceed its blocks or
        include its last one.
        """
        limit = min(request.capacity + 1, request.max_total_tokens - 1) - self.stride
        due = -((request.lane_offset - limit) // self.stride)
        request.due = due if due > earliest else earliest
        self._calendar.setdefault(request.due, []).append(request)
