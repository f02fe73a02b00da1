"""Admission control: requests beyond the limits on what may wait are refused at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.shared_cores.load_board import Load, Neighbours
from quire.errors import MaxQueuedTokensError, QueueOverflowError

_ENDED_HALF_LIFE_S, _REFUSED_HALF_LIFE_S = 10.0, 1.0
_LEAST_HINT_S, _MOST_HINT_S = 0.1, 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most unfinished completions, and the most prompt tokens of requests without output."""

    num_requests: int
    num_tokens: int


class FadingCount:
    """A decaying count: an event counts half after `half_life_s`, a quarter after twice that."""

    def __init__(self, half_life_s: float, now: float) -> None:
        self._half_life_s = half_life_s
        self._since = self._noted = now
        self._count = 0.0

    def at(self, now: float) -> float:
        """The count at time `now`, which must not be earlier than in the last call."""
        self._count *= 0.5 ** ((now - self._noted) / self._half_life_s)
        self._noted = now
        return self._count

    def add(self, count: int, now: float) -> None:
        self._count = self.at(now) + count

    def rate(self, now: float) -> float:
        """Events per second; a steady stream's count is its rate times the mean lifetime."""
        mean_life_s = self._half_life_s / math.log(2)
        # while the count is young it covers less than a mean lifetime
        known_s = mean_life_s * -math.expm1(-(now - self._since) / mean_life_s)
        return self.at(now) / max(known_s, 1e-3)


class Admission:
    """Decides before any work is done for a request, so that a refusal costs microseconds.

    The hint when to retry is the time, at the recent rate of finished completions, until as many
    have finished as this request and the recently refused ones ask for. So clients that are refused
    together are not all sent back at the same moment.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`neighbours` are the other servers of the same engine; the limits are for all of them."""
        self._outputs = outputs
        self._limits = limits
        self._neighbours = neighbours
        self._clock = clock
        self._ended = FadingCount(_ENDED_HALF_LIFE_S, clock())
        self._refused = FadingCount(_REFUSED_HALF_LIFE_S, clock())
        self.num_rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def check(self, num_completions: int) -> None:
        """Raise QueueOverflowError or MaxQueuedTokensError, with `retry_after_s`, above a limit."""
        limits, outputs = self._limits, self._outputs
        others = Load() if self._neighbours is None else self._neighbours.load()
        num_unfinished = outputs.num_unfinished + int(others.num_requests)
        num_queued_tokens = outputs.num_queued_tokens + int(others.num_tokens)
        excess = num_unfinished + num_completions - limits.num_requests
        if excess > 0:
            self.num_rejected["max_num_queued_reqs"] += 1
            raise QueueOverflowError(
                f"{num_unfinished} requests are unfinished, and the limit is "
                f"max_num_queued_reqs={limits.num_requests}. Try again later.",
                retry_after_s=self._hint_s(excess, others.ended_per_s),
            )
        if num_queued_tokens >= limits.num_tokens:
            self.num_rejected["max_num_queued_tokens"] += 1
            raise MaxQueuedTokensError(
                f"Requests with {num_queued_tokens} prompt tokens wait, and the limit is "
                f"max_num_queued_tokens={limits.num_tokens}. Try again later.",
                retry_after_s=self._hint_s(1, others.ended_per_s),
            )
        if self._neighbours is not None:
            # before the request is registered: a neighbour that checks at the same moment counts it
            # already
            self._neighbours.tell(num_requests=outputs.num_unfinished + num_completions)

    def note_ended(self, num_completions: int) -> None:
        self._ended.add(num_completions, self._clock())
        self.share_load()

    def share_load(self) -> None:
        if self._neighbours is not None:
            self._neighbours.tell(
                num_requests=self._outputs.num_unfinished,
                num_tokens=self._outputs.num_queued_tokens,
                ended_per_s=self._ended.rate(self._clock()),
            )

    def _hint_s(self, num_completions: int, ended_per_s: float) -> float:
        now = self._clock()
        wanted = num_completions + self._refused.at(now)
        self._refused.add(1, now)
        rate = self._ended.rate(now) + ended_per_s
        # nothing has ended lately, so nothing can be foretold
        if rate * _MOST_HINT_S < 1:
            return 1.0
        return min(_MOST_HINT_S, max(_LEAST_HINT_S, wanted / rate))
