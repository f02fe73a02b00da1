"""The processes of a model's ranks, and what they share with their core: links for messages, signs
of life, and the memory of exchanges.

Nothing of it has a name in the system, so that nothing is left whatever dies.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.distributed.mesh import Mesh
from quire.distributed.shared_group import SharedExchange
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import EngineError, LoadError
from quire.executor.ranks.board import RankBoard
from quire.executor.ranks.failures import known_error
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import RankAnswer, RankStart
from quire.processes.child_process import ChildProcess

_END_S = 5.0
"""Seconds that ranks may take to end by themselves."""


class RankProcesses:
    """A process for each rank of `mesh`. Whoever has this object reads `answers`, by rank."""

    def __init__(self, program: str, plan: Any, mesh: Mesh, cpus: Sequence[str]) -> None:
        """`program` is the module of theirs, and `plan` the engine's; `cpus` lists the logical CPUs
        of each rank's threads.
        """
        self._program = program
        self.mesh = mesh
        self.titles = [rank_title(rank) for rank in range(mesh.world_size)]
        self.answers: list[deque[RankAnswer]] = [deque() for _ in self.titles]
        self.children: list[ChildProcess] = []
        self.links: list[RankLink] = []
        self._exchanges: list[SharedExchange] = []
        self.board = RankBoard.open(mesh.world_size)
        try:
            if mesh.tp > 1:
                self._exchanges = [SharedExchange(mesh.tp) for _ in range(mesh.pp)]
            self._start(plan, cpus)
        except BaseException:
            self.kill()
            self.close()
            raise

    def collectives(self) -> list[int]:
        """The collectives that each rank has finished."""
        if not self._exchanges:
            return [0] * self.mesh.world_size
        return [count for exchange in self._exchanges for count in exchange.counts()]

    def reset(self) -> None:
        """Make aborted exchanges usable again; no rank may be in one."""
        for exchange in self._exchanges:
            exchange.reset()

    def last_error(self) -> EngineError | None:
        """The error that has ended a rank, when all have ended: the first that is more than the end
        of an exchange; None: no rank has said one.
        """
        said = [words for child in self.children if (words := child.last_words()) is not None]
        said.sort(key=lambda words: words[0] == ExchangeAborted.__name__)
        return _error_of(*said[0]) if said else None

    def kill(self) -> None:
        """End all processes at once."""
        for child in self.children:
            child.kill()

    def close(self) -> None:
        """Have all ranks end, and kill those that do not. Idempotent."""
        deadline = time.monotonic() + _END_S
        for link in self.links:
            link.close()
        for child in self.children:
            child.end(deadline - time.monotonic())
        for exchange in self._exchanges:
            exchange.close()
        self.children, self.links, self._exchanges = [], [], []
        self.board.close()

    def _start(self, plan: Any, cpus: Sequence[str]) -> None:
        mesh, ends = self.mesh, list[socket.socket]()
        before: dict[int, socket.socket] = {}
        after: dict[int, socket.socket] = {}
        theirs: list[socket.socket] = []
        try:
            for _ in self.titles:
                ours, own = socket.socketpair()
                self.links.append(RankLink(ours))
                theirs.append(own)
            for rank in range(mesh.world_size - mesh.tp):
                after[rank], before[rank + mesh.tp] = socket.socketpair()
            ends = [*theirs, *before.values(), *after.values()]
            starts = []
            for rank, own in enumerate(theirs):
                place = mesh.place(rank)
                exchange = self._exchanges[place.pp_rank].fileno() if self._exchanges else -1
                start = RankStart(
                    plan=plan,
                    rank=rank,
                    tensor_parallel_size=mesh.tp,
                    pipeline_parallel_size=mesh.pp,
                    cpus=cpus[rank] if len(cpus) == mesh.world_size else "",
                    link=own.fileno(),
                    board=self.board.fileno(),
                    exchange=exchange,
                    before=before[rank].fileno() if rank in before else -1,
                    after=after[rank].fileno() if rank in after else -1,
                )
                fds = (start.link, start.board, start.exchange, start.before, start.after)
                self.children.append(ChildProcess(self._program, [fd for fd in fds if fd >= 0]))
                starts.append(start)
            for child, start in zip(self.children, starts, strict=True):
                child.start(start)
        finally:
            for end in ends:
                end.close()


def _error_of(kind_name: str, text: str) -> EngineError:
    """The error that has ended a process, by its last words."""
    return known_error(kind_name, text) or LoadError(f"{kind_name}: {text}")


def rank_title(rank: int) -> str:
    """The name of a rank's process, in lists of processes and in the log."""
    return f"QuireWorker-{rank}"
