"""The worker that a call is made for, and the others: what vLLM calls the world group.

Methods that programs add to workers ask for it, and have nothing but the module to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorldGroup:
    """A worker's number among all, and how many there are."""

    rank: int = 0
    world_size: int = 1

    @property
    def rank_in_group(self) -> int:
        """The same as `rank`."""
        return self.rank

    @property
    def local_rank(self) -> int:
        """The same as `rank`, also where the workers of a core are on several machines."""
        return self.rank


_current: ContextVar[WorldGroup | None] = ContextVar("world", default=None)


def get_world_group() -> WorldGroup:
    """The world of the worker whose method runs; outside of one, that of a worker alone."""
    return _current.get() or WorldGroup()


@contextmanager
def of_worker(rank: int, world_size: int) -> Iterator[None]:
    """Have `get_world_group` give a worker's place meanwhile."""
    token = _current.set(WorldGroup(rank, world_size))
    try:
        yield
    finally:
        _current.reset(token)
