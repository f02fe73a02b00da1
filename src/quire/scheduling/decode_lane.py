"""The decoding requests: each takes a token in every step, plus drafts if it has any, and costs the
scheduler nothing until something is due.

The lane keeps a clock that ticks once per step. Without drafts a request at position p when it
joins at tick t is at position p + (t' - t) at tick t', so its next block boundary and its last
token are known ticks, kept in a calendar. A steady step therefore costs the scheduler nothing per
request.

With up to K drafts a step takes a request 1 .. K+1 tokens further, and while steps are in flight
its position is known only between two bounds: it follows from the known tokens, the steps in flight
and their drafts. The calendar reckons with K+1 tokens per tick, so that an event is never late; one
that is early is put back. Blocks are allocated up to the upper bound, and released by the lower
bound once no query reads them any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat

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

    def __init__(self, num_drafts: int = 0, in_flight: Collection[object] = ()) -> None:
        """num_drafts: the most drafts of a member in a step. in_flight: the steps whose results are
        not known yet.
        """
        self.tick = 0
        self.members: dict[int, Request] = {}
        self.stride = num_drafts + 1
        """The most tokens that a member may advance in a tick."""
        self._in_flight = in_flight
        self._calendar: dict[int, list[Request]] = {}
        self._cohort: Cohort | None = None
        self._short: dict[int, int] = {}
        """Drafts, by row, of the members whose blocks or length do not allow all of theirs at this
        tick.
        """

    def __contains__(self, request: Request) -> bool:
        return self.members.get(request.row) is request

    def join(self, request: Request) -> None:
        """Add a request, which takes tokens in every step after the newest one in flight, in which
        it samples.
        """
        request.joined = self.tick - 1
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
        flying = min(len(self._in_flight), self.tick - request.joined)
        return request.num_tokens - 1 + flying + request.num_drafts_in_flight

    def due(self) -> list[Request]:
        """Remove from the calendar, and return, the members for which this tick may be a block
        boundary or the last token.
        """
        self._short = {}
        due = self._calendar.pop(self.tick, ())
        present = [request for request in due if request.due == self.tick and request in self]
        if self.stride == 1:
            return present
        for request in present:
            self._enter_calendar(request, self.tick)
        return self._calendar.pop(self.tick, [])

    def reschedule(self, request: Request) -> None:
        """Put a member back into the calendar after its event was handled."""
        if (room := self.room(request)) < self.stride:
            self._short[request.row] = room - 1
        self._enter_calendar(request, self.tick + 1)

    def room(self, request: Request) -> int:
        """The number of tokens that a member's blocks and its maximum length allow at this tick."""
        end = min(request.capacity, request.max_total_tokens - 1)
        return end - self.position(request)

    def is_current(self, cohort: Cohort | None) -> bool:
        return cohort is not None and cohort is self._cohort

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
        requests = self.members.values()
        counts = [request.num_drafts for request in requests]
        if self._short:
            fitting = map(self._short.get, self.members, repeat(self.stride))
            counts = list(map(min, counts, fitting))
        if sum(counts) > most:
            counts = _first(counts, most)
        if not any(counts):
            return None
        for request, count in zip(requests, counts, strict=True):
            request.num_drafts_in_flight += count
        return counts

    def advance(self) -> None:
        """Tick: a step is planned, and in flight."""
        self.tick += 1

    def _enter_calendar(self, request: Request, earliest: int) -> None:
        """Schedule the member's event: the first tick at which its tokens may exceed its blocks or
        include its last one.
        """
        limit = min(request.capacity + 1, request.max_total_tokens - 1) - self.stride
        due = self.tick - (self.position(request) - limit) // self.stride
        request.due = due if due > earliest else earliest
        self._calendar.setdefault(request.due, []).append(request)


def _first(counts: Sequence[int], most: int) -> list[int]:
    """The counts up to `most` in all, the rest cut off."""
    found = []
    for count in counts:
        found.append(min(count, most))
        most -= found[-1]
    return found
