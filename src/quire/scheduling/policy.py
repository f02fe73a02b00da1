"""Who goes first, and who has to give way: an order over requests, and the waiting queue kept in
it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from quire.scheduling.request import Request

Rank = tuple[float, ...]
Policy = Callable[[Request], Rank]
"""Smaller runs first; the largest among the running is the victim when memory runs out."""


def fcfs(request: Request) -> Rank:
    """First come, first served. A preempted request keeps its place, which is before all that came
    later.
    """
    return (request.order,)


def priority(request: Request) -> Rank:
    """Smaller priority number first, then first come."""
    return (request.priority, request.arrival_time, request.order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def choose_victim(policy: Policy, running: Iterable[Request], request: Request) -> Request:
    """The running request that gives its blocks back for `request`, which may be itself."""
    return max((r for r in running if r is request or not r.is_protected), key=policy)


class WaitingQueue:
    """Waiting requests in the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._policy)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._policy(request), key=self._policy)
        assert self._requests[index] is request
        del self._requests[index]
