"""Cores that step together live and die together: who falls when one of them has died."""

from __future__ import annotations

from quire.engine.client.connections import CoreLinks
from quire.engine.process.core_pool import CoreHost
from quire.engine.process.liveness import PEERS_LOST


class CoreGroup:
    """All cores of a client, whose lives have the same numbers.

    The first to end is the one that has died; the others fall with it, killed or by themselves, and
    their requests are beyond suspicion.
    """

    def __init__(self, links: CoreLinks, host: CoreHost) -> None:
        self._links = links
        self._host = host
        self._first: tuple[int, int] = (0, -1)

    def fell(self, engine_index: int) -> bool:
        """A core has ended: whether it was not the first of its life's number."""
        incarnation = self._links.links[engine_index].incarnation
        if self._first[0] < incarnation:
            self._first = (incarnation, self._culprit(engine_index, incarnation))
        return self._first != (incarnation, engine_index)

    def _culprit(self, engine_index: int, incarnation: int) -> int:
        """Who has misses another one ended behind it, though it may be noticed before it."""
        if self._host.processes[engine_index].exit_code == PEERS_LOST:
            for other in self.rest_of(engine_index):
                process = self._host.processes.get(other)
                if process is None or process.exit_code not in (None, PEERS_LOST):
                    return other
        return engine_index

    def rest_of(self, engine_index: int) -> list[int]:
        """The others of the same life's number that have not been missed yet."""
        links = self._links.links
        number = links[engine_index].incarnation
        return [
            index
            for index, link in links.items()
            if index != engine_index and not link.is_dead and link.incarnation <= number
        ]

    def why(self, engine_index: int) -> str:
        """What is said of those that fall with a core."""
        return f"core {engine_index}, with which it stepped together, has ended"
