"""The processes of a model's ranks as their core has them: on this machine they share memory with
it (local_ranks.py), anywhere else they are reached over a network (network_ranks.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from quire.distributed.mesh import Mesh
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import EngineError, LoadError
from quire.executor.ranks.board import RankSigns
from quire.executor.ranks.failures import known_error
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import RankAnswer
from quire.processes.owned_process import OwnedProcess

_END_S = 5.0
"""Seconds that ranks may take to end by themselves."""


class RankProcesses:
    """A process for each rank of `mesh`. Whoever has this object reads `answers`, by rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.titles = [rank_title(rank) for rank in range(mesh.world_size)]
        self.answers: list[deque[RankAnswer]] = [deque() for _ in self.titles]
        self.children: list[OwnedProcess] = []
        self.links: list[RankLink] = []
        self.asides: list[RankLink] = []
        """Links for calls aside of steps, by rank."""

    ranks_rejoin = False
    """Whether ranks make exchanges usable again, each its own side, when they are told so."""

    def signs(self) -> Sequence[RankSigns]:
        """The signs of life of all ranks, as the core knows them now."""
        raise NotImplementedError

    def collectives(self) -> Sequence[int]:
        """The collectives that each rank is known to have finished."""
        raise NotImplementedError

    def waits(self) -> Sequence[tuple[int, int]]:
        """Time that each rank has waited for others in collectives, in ns, and how often it slept
        meanwhile; zeros where the core does not see it.
        """
        return [(0, 0)] * self.mesh.world_size

    def reset(self) -> None:
        """Make aborted exchanges usable again; no rank may be in one."""
        raise NotImplementedError

    def last_error(self) -> EngineError | None:
        """The error that has ended a rank, when all have ended: the first that is more than the end
        of an exchange; None: no rank has said one.
        """
        said = [words for child in self.children if (words := child.last_words()) is not None]
        said.sort(key=lambda words: words[0] == ExchangeAborted.__name__)
        return _error_of(*said[0]) if said else None

    def error_of(self, rank: int) -> EngineError:
        """The error that has ended a rank's process: what it has said, or else its end in words."""
        child = self.children[rank]
        ending, said = child.exit_words(), child.last_words()
        return _error_of(*said) if said else LoadError(f"{self.titles[rank]} {ending}.")

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def close(self) -> None:
        """Have all ranks end, and kill those that do not. Idempotent."""
        # one deadline for all: many ranks take no longer than one
        deadline = time.monotonic() + _END_S
        for link in (*self.links, *self.asides):
            link.close()
        for child in self.children:
            child.end(deadline - time.monotonic())
        self.children, self.links, self.asides = [], [], []


def _error_of(kind_name: str, text: str) -> EngineError:
    """The error that has ended a process, by its last words."""
    return known_error(kind_name, text) or LoadError(f"{kind_name}: {text}")


def rank_title(rank: int) -> str:
    """The name of a rank's process, in lists of processes and in the log."""
    return f"QuireWorker-{rank}"
