"""Sampled tokens on their way from the worker that samples to those that do not."""

from __future__ import annotations

from collections.abc import Iterable

from quire.step.result import NewTokens


class TokenOutbox:
    """Keeps new tokens until the next launch of each worker that needs them, in their order."""

    def __init__(self, num_workers: int) -> None:
        self._waiting: list[list[NewTokens]] = [[] for _ in range(num_workers)]

    def put(self, new: NewTokens | None, ranks: Iterable[int]) -> None:
        """Add the tokens of a step, None: it had none, for these workers."""
        if new is not None:
            for rank in ranks:
                self._waiting[rank].append(new)

    def take(self, rank: int) -> list[NewTokens]:
        """Return what a worker's next launch brings it."""
        taken, self._waiting[rank] = self._waiting[rank], []
        return taken
