"""Which request is in which row, and what the runner has yet to be told of it."""

from __future__ import annotations

import heapq

from quire.scheduling.request import Request
from quire.scheduling.step import NewRow
from quire.scheduling.stop import StopWatch


class RunningRows:
    """The rows as a resource, with the requests that hold one (idle ones included).

    A plan removes and adds what has changed since the plan before it.
    """

    holds_back_others = True

    def __init__(self, num_rows: int) -> None:
        self.requests: dict[int, Request] = {}
        """By row."""
        self.constrained: dict[int, Request] = {}
        """Those of them that have a grammar."""
        self.stops = StopWatch()
        self._free = list(range(num_rows))
        self._removed: list[int] = []
        self._added: dict[int, tuple[Request, int]] = {}
        """Handle -> request and its computed tokens, where the runner has yet to build the row."""

    @property
    def is_exhausted(self) -> bool:
        return not self._free

    def offer(self, request: Request, want: int) -> int:
        return want if self._free else 0

    def take(self, request: Request) -> None:
        request.row = heapq.heappop(self._free)
        self.requests[request.row] = request
        if request.grammar is not None:
            self.constrained[request.row] = request
        self.stops.add(request)
        self._added[request.handle] = request, request.num_hit_tokens

    def give_back(self, request: Request) -> None:
        self.stops.remove(request)
        self._removed.append(request.row)
        self._added.pop(request.handle, None)
        heapq.heappush(self._free, request.row)
        del self.requests[request.row]
        self.constrained.pop(request.row, None)
        request.row = -1

    def rebuild(self, request: Request) -> None:
        """The request keeps its row, but what the runner knows of it no longer holds."""
        self._removed.append(request.row)
        self._added[request.handle] = request, request.num_computed_tokens

    def is_new(self, handle: int) -> bool:
        """Whether the next plan adds the request's row, with all its blocks."""
        return handle in self._added

    def take_changes(self) -> tuple[list[int], list[NewRow]]:
        """The rows that the plan made now removes, and those that it adds after that."""
        removed, added = self._removed, [r.new_row(start) for r, start in self._added.values()]
        self._removed, self._added = [], {}
        return removed, added
