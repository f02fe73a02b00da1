"""Finds out which core of a lock-step group died, and which ones had to end because of it."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.client.core_sockets import CoreConnection
from quire.engine.process.liveness import PEERS_LOST
from quire.errors import PeersLost


class LockstepGroup:
    """All cores of a client that share experts. They restart together, so that their incarnation
    numbers are equal.

    The first process to end is the one that has died. The others are killed, or end by themselves
    with `PEERS_LOST`, and their requests are cleared. A core on another machine, whose exit code
    nobody sees, has died first unless it has reported that it lost the others.
    """

    def __init__(self, connections: Mapping[int, CoreConnection]) -> None:
        self._connections = connections
        self._first: tuple[int, int] = (0, -1)
        """The latest incarnation that has ended, and the core of it that was first."""

    def was_ended_by_peer(self, connection: CoreConnection) -> bool:
        """Note the end of a core's process: whether another core of its incarnation was first."""
        if self._first[0] < connection.incarnation:
            self._first = (connection.incarnation, self._first_to_end(connection))
        return self._first != (connection.incarnation, connection.engine_index)

    def peers_of(self, connection: CoreConnection) -> list[CoreConnection]:
        """The other cores of its incarnation, or an earlier one, that are not known to be dead."""
        return [
            peer
            for peer in self._connections.values()
            if peer is not connection
            and not peer.is_dead
            and peer.incarnation <= connection.incarnation
        ]

    def _first_to_end(self, connection: CoreConnection) -> int:
        """A core that lost its peers ended after another one, even if that is noticed later."""
        if _has_lost_peers(connection):
            for peer in self.peers_of(connection):
                if _may_have_died(peer) and not _has_lost_peers(peer):
                    return peer.engine_index
        return connection.engine_index


def _has_lost_peers(connection: CoreConnection) -> bool:
    if connection.process is None:
        return connection.reported_error.startswith(PeersLost.__name__)
    return connection.process.exit_code == PEERS_LOST


def _may_have_died(connection: CoreConnection) -> bool:
    return connection.process is None or connection.process.exit_code is not None
