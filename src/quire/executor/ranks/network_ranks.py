"""Ranks that their core reaches over a network: each has a connection for messages and one for its
signs of life, and all meet at a store of the core's.

Whoever starts their processes says where they run; on one machine, they share memory all the same.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import distributed

from quire.distributed.mesh import Mesh
from quire.distributed.peer_sockets import PeerListener
from quire.errors import LoadError, PeersLost
from quire.executor.ranks.board import SIGNS, RankSigns
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import DistantRank, RankStart
from quire.executor.ranks.processes import RankProcesses
from quire.processes.owned_process import OwnedProcess

_EACH = 3
"""Connections of a rank to its core: for messages, signs of life, and calls aside of steps."""
_CALLED_S = 300.0
"""Seconds that a process may take to start and to connect."""
_GREETED_S = 30.0
"""Seconds in which it comes where somebody else was sent away first."""


class NetworkRanks(RankProcesses):
    """Processes that `start_process` has started, by rank: it gives each its start message."""

    ranks_rejoin = True

    def __init__(
        self,
        start_process: Callable[[int], OwnedProcess],
        plan: Any,
        mesh: Mesh,
        cpus: Sequence[str],
        address: str = "127.0.0.1",
    ) -> None:
        """`plan` is the engine's; `cpus` lists the logical CPUs of each rank's threads. `address`:
        of this machine, as the ranks reach it. Raises the error of a rank that ends before it has
        connected, LoadError where one does not come.
        """
        super().__init__(mesh)
        self._signs = [RankSigns(0, 0) for _ in self.titles]
        self._connections: list[socket.socket] = []
        # the core only hosts the store, and waits for nobody there
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            address, 0, None, True, wait_for_workers=False
        )
        try:
            self._start(start_process, plan, cpus, address)
        except BaseException:
            self.kill()
            self.close()
            raise

    def signs(self) -> Sequence[RankSigns]:
        """The last that each rank has sent."""
        for rank, connection in enumerate(self._connections):
            with suppress(BlockingIOError, OSError):
                while data := connection.recv(SIGNS.size, socket.MSG_WAITALL | socket.MSG_DONTWAIT):
                    if len(data) < SIGNS.size:
                        data += connection.recv(SIGNS.size - len(data), socket.MSG_WAITALL)
                    self._signs[rank] = RankSigns(*SIGNS.unpack(data))
        return self._signs

    def collectives(self) -> Sequence[int]:
        """None is known: what a rank has done it counts by tasks."""
        return [0] * self.mesh.world_size

    def reset(self) -> None:
        """Do nothing: ranks rejoin."""

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _start(
        self,
        start_process: Callable[[int], OwnedProcess],
        plan: Any,
        cpus: Sequence[str],
        address: str,
    ) -> None:
        mesh, listeners = self.mesh, list[PeerListener]()
        try:
            for rank in range(mesh.world_size):
                listeners += [PeerListener(address, _GREETED_S) for _ in range(_EACH)]
                link_of, signs_of, aside_of = (one.told for one in listeners[-_EACH:])
                child = start_process(rank)
                self.children.append(child)
                child.start(
                    RankStart(
                        plan=plan,
                        rank=rank,
                        mesh=mesh,
                        cpus=cpus[rank] if len(cpus) == mesh.world_size else "",
                        distant=DistantRank(link_of, signs_of, aside_of, address, self._store.port),
                    )
                )
            for place in range(mesh.world_size):
                link, signs, aside = listeners[_EACH * place : _EACH * (place + 1)]
                self._connections.append(self._accepted(signs))
                self.links.append(RankLink(self._accepted(link)))
                self.asides.append(RankLink(self._accepted(aside)))
        except PeersLost as error:
            raise LoadError(f"The ranks of the model do not connect: {error}") from error
        finally:
            for listener in listeners:
                listener.close()

    def _accepted(self, listener: PeerListener) -> socket.socket:
        """Wait for the connection of a rank, as long as all ranks live."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        ranks = {child.pipe.fileno(): rank for rank, child in enumerate(self.children)}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_CALLED_S * 1000):
            if fd in ranks:
                raise self.error_of(ranks[fd])
        return listener.accept()
