"""A bound on the tokens of a model's reasoning: when it is reached, only the end delimiter is
allowed.

It is a function of the output's ids alone, as a grammar is, so preemption and restarts change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.grammar.bits import allow
from quire.params.thinking import Thinking


class ThinkingBudget:
    """Counts the reasoning tokens of one output: those after the last start delimiter, until an end
    delimiter follows; another start counts from 0.
    """

    def __init__(self, limit: Thinking) -> None:
        self._limit = limit
        self._count: int | None
        self._tail: list[int]
        self.restart()
        self._longest = max(len(limit.start_ids), len(limit.end_ids))

    def restart(self) -> None:
        self._count = self._limit.num_before
        self._num_taken = 0
        self._tail = []

    def open(self) -> None:
        """Count from here: a start delimiter has come, in whatever tokens."""
        self._count = 0

    def take_in(self, output_token_ids: Sequence[int]) -> None:
        """Process the output so far, starting after the tokens of the last call."""
        for place in range(self._num_taken, len(output_token_ids)):
            self.take(output_token_ids[place])
        self._num_taken = len(output_token_ids)

    def mark(self) -> tuple[int | None, list[int]]:
        """Return what `return_to` needs to forget the tokens that are taken from now on."""
        return self._count, list(self._tail)

    def return_to(self, mark: tuple[int | None, list[int]]) -> None:
        self._count, self._tail = mark

    def take(self, index: int) -> None:
        """Process one token after those of the output."""
        tail, limit = self._tail, self._limit
        tail.append(index)
        # what a delimiter may still need
        del tail[: -self._longest]
        if self._count is not None:
            self._count += 1
            if tail[-len(limit.end_ids) :] == limit.end_ids:
                self._count = None
        elif tail[-len(limit.start_ids) :] == limit.start_ids:
            self._count = 0

    @property
    def forced(self) -> int | None:
        """The only allowed token, which continues an end delimiter; None: any is allowed."""
        if self._count is None or self._count < self._limit.budget:
            return None
        end = self._limit.end_ids
        # only tokens of this reasoning: the tail may reach back before its start
        known = min(len(end) - 1, len(self._tail), self._count)
        lengths = range(known, 0, -1)
        done = next((n for n in lengths if self._tail[-n:] == end[:n]), 0)
        return end[done]

    def restrict(self, mask: np.ndarray) -> None:
        """Restrict a mask [ceil(V/32)] int32 to the forced token, if there is one."""
        if (index := self.forced) is not None:
            mask[:] = 0
            allow(mask, index)


def num_thinking(ids: Sequence[int], start_ids: list[int], end_ids: list[int]) -> int | None:
    """Return the number of tokens after a prompt's last start delimiter; None if there is no such
    delimiter, or an end delimiter follows.
    """
    # from the end, where the template has opened or closed the reasoning
    for place in range(len(ids), 0, -1):
        if list(ids[place - len(end_ids) : place]) == end_ids and place >= len(end_ids):
            return None
        if list(ids[place - len(start_ids) : place]) == start_ids and place >= len(start_ids):
            return len(ids) - place
    return None
