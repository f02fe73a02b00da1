"""Which core of a lock-step group has died, and which ones had to end because of it."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.client.core_connection import CoreConnection
from quire.engine.process.core_process import CoreProcess
from quire.engine.process.liveness import PEERS_LOST


class LockstepGroup:
    """All cores of a client that share experts; they restart together, so that their incarnation
    numbers are equal.

    The first process to end is the one that has died. The others are killed, or end by themselves
    with `PEERS_LOST`, and their requests are cleared of suspicion.
    """

    def __init__(
        self,
        connections: Mapping[int, CoreConnection],
        processes: Mapping[int, CoreProcess],
    ) -> None:
        """Both by engine index; they are read when they are needed."""
        self._connections = connections
        self._processes = processes
        self._first: tuple[int, int] = (0, -1)
        """The latest incarnation that has ended, and the core of it that was first."""

    def was_ended_by_peer(self, engine_index: int) -> bool:
        """Note the end of a core's process: whether another core of its incarnation was first."""
        incarnation = self._connections[engine_index].incarnation
        if self._first[0] < incarnation:
            self._first = (incarnation, self._first_to_end(engine_index))
        return self._first != (incarnation, engine_index)

    def peers_of(self, engine_index: int) -> list[int]:
        """The other cores of the same incarnation, or an earlier one, not known to be dead yet."""
        incarnation = self._connections[engine_index].incarnation
        return [
            index
            for index, connection in self._connections.items()
            if index != engine_index
            and not connection.is_dead
            and connection.incarnation <= incarnation
        ]

    def _first_to_end(self, engine_index: int) -> int:
        """A core that lost its peers ended after another one, even if that is noticed later."""
        if self._processes[engine_index].exit_code == PEERS_LOST:
            for peer in self.peers_of(engine_index):
                process = self._processes.get(peer)
                if process is None or process.exit_code not in (None, PEERS_LOST):
                    return peer
        return engine_index
