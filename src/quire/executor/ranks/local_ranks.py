"""Ranks on this machine, and what they share with their core: links for messages, signs of life,
and the memory of exchanges.

Nothing of it has a name in the system, so that nothing is left whatever dies.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from quire.distributed.mesh import Mesh
from quire.distributed.shared_group import SharedExchange
from quire.executor.ranks.board import RankBoard, RankSigns
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import RankStart
from quire.executor.ranks.processes import RankProcesses
from quire.processes.child_process import ChildProcess


class LocalRanks(RankProcesses):
    """Child processes, which inherit descriptors."""

    def __init__(
        self,
        program: str,
        plan: Any,
        mesh: Mesh,
        cpus: Sequence[str],
        shared: Sequence[int] = (),
    ) -> None:
        """`program` is the module of theirs, and `plan` the engine's; `cpus` lists the logical CPUs
        of each rank's threads. `shared`: descriptors that the plan names.
        """
        super().__init__(mesh)
        self._program, self._shared = program, shared
        self._exchanges: list[SharedExchange] = []
        self._board = RankBoard.open(mesh.world_size)
        try:
            if mesh.tp > 1:
                self._exchanges = [SharedExchange(mesh.tp) for _ in range(mesh.pp)]
            self._start(plan, cpus)
        except BaseException:
            self.kill()
            self.close()
            raise

    def signs(self) -> Sequence[RankSigns]:
        return self._board.signs()

    def collectives(self) -> Sequence[int]:
        if not self._exchanges:
            return [0] * self.mesh.world_size
        return [count for exchange in self._exchanges for count in exchange.counts()]

    def waits(self) -> Sequence[tuple[int, int]]:
        if not self._exchanges:
            return super().waits()
        return [each for exchange in self._exchanges for each in exchange.waits()]

    def reset(self) -> None:
        for exchange in self._exchanges:
            exchange.reset()

    def close(self) -> None:
        super().close()
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges = []
        self._board.close()

    def _start(self, plan: Any, cpus: Sequence[str]) -> None:
        mesh, ends = self.mesh, list[socket.socket]()
        before: dict[int, socket.socket] = {}
        after: dict[int, socket.socket] = {}
        theirs: list[socket.socket] = []
        asides: list[socket.socket] = []
        try:
            for _ in self.titles:
                for links, ends_of in ((self.links, theirs), (self.asides, asides)):
                    ours, own = socket.socketpair()
                    links.append(RankLink(ours))
                    ends_of.append(own)
            for rank in range(mesh.world_size - mesh.tp):
                after[rank], before[rank + mesh.tp] = socket.socketpair()
            ends = [*theirs, *asides, *before.values(), *after.values()]
            starts = []
            for rank, own in enumerate(theirs):
                place = mesh.place(rank)
                exchange = self._exchanges[place.pp_rank].fileno() if self._exchanges else -1
                start = RankStart(
                    plan=plan,
                    rank=rank,
                    mesh=mesh,
                    cpus=cpus[rank] if len(cpus) == mesh.world_size else "",
                    link=own.fileno(),
                    board=self._board.fileno(),
                    exchange=exchange,
                    before=before[rank].fileno() if rank in before else -1,
                    after=after[rank].fileno() if rank in after else -1,
                    aside=asides[rank].fileno(),
                )
                fds = (
                    *(start.link, start.board, start.exchange, start.before, start.after),
                    start.aside,
                    *self._shared,
                )
                self.children.append(ChildProcess(self._program, [fd for fd in fds if fd >= 0]))
                starts.append(start)
            for child, start in zip(self.children, starts, strict=True):
                child.start(start)
        finally:
            # the children have their own copies: an end that stayed open here would hide their
            # death
            for end in ends:
                end.close()
