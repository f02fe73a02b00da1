"""Number of drafts worth their costs: from what was accepted and how long steps took.

A draft at place j of a row is accepted with probability a^j, where a is a moving average of the
row's; a step of n tokens takes T(n), which is learnt from the steps themselves. The number of
drafts is the one with the most expected tokens per second, none included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.runner.devices.device import Array

_DECAY = 0.9
"""Share of what is known of a row's acceptance that counts in the next step."""
_PRIOR = 4.0
"""Drafts that the average of all rows counts for in that of one."""
_NEWEST = 0.2
"""Weight of the newest time of drafting."""
_SHORTER, _LONGER = 0.5, 0.1
"""Weights of the newest time of a step where it is shorter or longer than the average."""
_FIRST_TIMES = 3
_LEAST_GAIN = 1.03
"""Expected gain for which drafts are made at all: small ones come and go with every step."""
_FIRST_TRY = 64
_LAST_TRY = 1024
"""Steps without drafts after which one is tried; twice as many each time, up to the last."""
_SHARE_OF_TRIAL = 8
"""One row in so many has the draft."""
_PATIENCE = 16
_LOOK_EVERY = 8
"""Steps of which one asks whether drafts pay, once `_PATIENCE` have gone without."""
_FIRST_REST = 8
_LAST_REST = 256
"""Steps with drafts after which one goes without, so that its time is known; as with tries."""
_ABOUT = 1.25
"""Sizes of steps that differ by less than this factor take about the same time."""
_FIRST_SLOPE = 0.02
"""Share of a step's time that a further token is taken to cost before that is known."""


class Pace(Protocol):
    """Says how many drafts are wanted."""

    def limits(self, rows: Sequence[int], longest: Sequence[int]) -> list[int]:
        """Return how many drafts each of a step's sampled rows may have, at most `longest`."""
        ...

    def note_accepted(self, rows: Sequence[int], drafts: Array, accepted: Array) -> None:
        """Note how many of each row's `drafts` [R] were right."""
        ...

    def note_time(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step that computed so many tokens, each of which was sampled."""
        ...

    def note_drafting(self, num_passes: int, seconds: float) -> None:
        """Note how long it took to make up to `num_passes` drafts of each row."""
        ...

    def forget(self, row: int) -> None:
        """The row has another request."""
        ...


class FixedPace:
    """As many drafts as there may be; with `by_batch` (first, last, k) at most k in a step of first
    .. last rows, and beyond and between ranges the k of the one before.
    """

    def __init__(self, num_tokens: int, by_batch: Sequence[tuple[int, int, int]] = ()) -> None:
        self._num_tokens = num_tokens
        self._by_batch = by_batch

    def limits(self, rows: Sequence[int], longest: Sequence[int]) -> list[int]:
        most = self._num_tokens
        for first, _, count in self._by_batch:
            if first > len(rows):
                break
            most = min(self._num_tokens, count)
        return [min(most, n) for n in longest]

    def note_accepted(self, rows: Sequence[int], drafts: Array, accepted: Array) -> None:
        """Do nothing: nothing depends on it."""

    def note_time(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: nothing depends on it."""

    def note_drafting(self, num_passes: int, seconds: float) -> None:
        """Do nothing: nothing depends on it."""

    def forget(self, row: int) -> None:
        """Do nothing: rows are alike."""


class MeasuredPace:
    """As many drafts as pay. Invariant: `_right` <= `_tried`, weights of verified drafts by row;
    the last entry is of all rows.
    """

    def __init__(self, num_tokens: int, num_rows: int, max_drafts: int) -> None:
        """`num_tokens`: the most drafts of a row; `max_drafts`: the most of all rows of a step."""
        self._num_tokens = num_tokens
        self._max_drafts = max_drafts
        self._right = np.zeros(num_rows + 1)
        self._tried = np.zeros(num_rows + 1)
        self._times = StepTimes()
        self._drafting_s = 0.0
        self._num_without = self._num_with = 0
        self._next_try, self._next_rest = _FIRST_TRY, _FIRST_REST

    def limits(self, rows: Sequence[int], longest: Sequence[int]) -> list[int]:
        most = np.minimum(np.asarray(longest, dtype=np.int64), self._num_tokens)
        is_waiting = self._num_without > _PATIENCE and self._num_without % _LOOK_EVERY
        if is_waiting or not most.any():
            self._num_without += 1
            return [0] * len(rows)
        counts = self._best(np.asarray(rows, dtype=np.int64), most)
        if counts.any():
            self._num_without, self._num_with = 0, self._num_with + 1
            self._next_try = _FIRST_TRY
            if self._num_with >= self._next_rest:
                self._next_rest = min(2 * self._next_rest, _LAST_REST)
                self._num_with = 0
                counts[:] = 0
        else:
            self._next_rest = _FIRST_REST
            self._num_without += 1
            if self._num_without >= self._next_try:
                self._next_try = min(2 * self._next_try, _LAST_TRY)
                self._num_without = 0
                counts = self._trial(np.asarray(rows, dtype=np.int64), most)
        found: list[int] = counts.tolist()
        return found

    def note_accepted(self, rows: Sequence[int], drafts: Array, accepted: Array) -> None:
        tried = np.minimum(drafts, accepted + 1)
        if not tried.any():
            return
        where = np.asarray(rows, dtype=np.int64)
        for weights, new in ((self._right, accepted), (self._tried, tried)):
            weights[where] = _DECAY * weights[where] + new
            weights[-1] = 0.99 * weights[-1] + new.sum()

    def note_time(self, num_tokens: int, seconds: float) -> None:
        self._times.note(num_tokens, seconds)

    def note_drafting(self, num_passes: int, seconds: float) -> None:
        if num_passes:
            self._drafting_s += _NEWEST * (seconds / num_passes - self._drafting_s)

    def forget(self, row: int) -> None:
        self._right[row] = self._tried[row] = 0.0

    def _trial(self, rows: Array, most: Array) -> Array:
        """A draft for some of the rows, of which least is known: where many rows make a step wait
        for computation, one for each would cost as much as a step.
        """
        counts = np.zeros(len(rows), dtype=np.int64)
        open_rows = np.flatnonzero(most)
        known = self._tried[rows[open_rows]]
        few = np.argsort(known, kind="stable")[: max(1, len(rows) // _SHARE_OF_TRIAL)]
        counts[open_rows[few]] = 1
        return counts

    def _chances(self, rows: Array) -> Array:
        """The probability of each row that a draft is right after one that was."""
        of_all = (self._right[-1] + _PRIOR * 0.7) / (self._tried[-1] + _PRIOR)
        right = self._right[rows] + _PRIOR * of_all
        return np.asarray(right / (self._tried[rows] + _PRIOR))

    def _best(self, rows: Array, most: Array) -> Array:
        """The number of drafts of each row with the most expected tokens per second."""
        places = np.arange(1, int(most.max()) + 1)
        gains = self._chances(rows)[:, None] ** places
        gains[places[None, :] > most[:, None]] = 0.0
        order = np.argsort(-gains, axis=None, kind="stable")[: self._max_drafts]
        found = gains.ravel()[order]
        order = order[found > 0]
        expected = len(rows) + np.concatenate([[0.0], np.cumsum(found[found > 0])])
        times = self._times.of(len(rows), len(order))
        if times is None:
            return np.zeros(len(rows), dtype=np.int64)  # the time of a step without drafts is next
        passes = np.maximum.accumulate(np.concatenate([[0], places[order % len(places)]]))
        speeds = expected / (times + self._drafting_s * passes)
        count = int(speeds.argmax())
        if speeds[count] < _LEAST_GAIN * speeds[0]:
            count = 0
        return np.bincount(order[:count] // len(places), minlength=len(rows))


class StepTimes:
    """The time of a step by its number of tokens: moving averages, and lines between them."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note a step's time. What holds a step up only makes it longer, so that shorter times
        count for more, and of the first ones the shortest.
        """
        count = self._counts[num_tokens] = self._counts.get(num_tokens, 0) + 1
        before = self._known.get(num_tokens, seconds)
        if count <= _FIRST_TIMES:
            self._known[num_tokens] = min(before, seconds)
        else:
            weight = _SHORTER if seconds < before else _LONGER
            self._known[num_tokens] = before + weight * (min(seconds, 2 * before) - before)

    def of(self, num_tokens: int, more: int) -> Array | None:
        """Return the times of steps of num_tokens .. num_tokens + more tokens, ascending; None
        where steps of about `num_tokens` tokens or fewer are not known well enough.
        """
        if not any(
            size <= _ABOUT * num_tokens and count >= _FIRST_TIMES
            for size, count in self._counts.items()
        ):
            return None
        sizes = np.array(sorted(self._known))
        times = np.maximum.accumulate(np.array([self._known[size] for size in sizes.tolist()]))
        wanted = np.arange(num_tokens, num_tokens + more + 1)
        found = np.interp(wanted, sizes, times)
        beyond = np.maximum(0, wanted - sizes[-1])
        return np.asarray(found + beyond * self._slope(sizes, times))

    def _slope(self, sizes: Array, times: Array) -> float:
        """Cost of a token beyond the largest known step."""
        if len(sizes) == 1:
            return float(_FIRST_SLOPE * times[-1])
        return float((times[-1] - times[0]) / (sizes[-1] - sizes[0]))
