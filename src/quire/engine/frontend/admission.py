"""How much may wait in front of an engine that serves: beyond it a request is refused at once."""

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
    """Most unfinished completions, and most prompt tokens of those without a first output."""

    num_requests: int
    num_tokens: int


class FadingCount:
    """How many lately: an event counts half after `half_life_s`, a quarter after twice that."""

    def __init__(self, half_life_s: float, now: float) -> None:
        self._half_life_s = half_life_s
        self._since = self._noted = now
        self._count = 0.0

    def at(self, now: float) -> float:
        """The count at a moment that is not before the last one."""
        self._count *= 0.5 ** ((now - self._noted) / self._half_life_s)
        self._noted = now
        return self._count

    def add(self, count: int, now: float) -> None:
        """So many more."""
        self._count = self.at(now) + count

    def rate(self, now: float) -> float:
        """Events per second; of a steady stream the count is that of a mean life."""
        mean_life_s = self._half_life_s / math.log(2)
        known_s = mean_life_s * -math.expm1(-(now - self._since) / mean_life_s)
        return self.at(now) / max(known_s, 1e-3)


class Admission:
    """Decides before anything is done for a request, so that saying no costs microseconds.

    The hint when to come back is how long it takes, at the rate of late, until as many completions
    have ended as this request and those that were just refused ask for: a crowd that is refused
    together is not told to come back together at once.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`neighbours` are the other servers of the same engine: the limits are for all."""
        self._outputs = outputs
        self._limits = limits
        self._neighbours = neighbours
        self._clock = clock
        self._ended = FadingCount(_ENDED_HALF_LIFE_S, clock())
        self._refused = FadingCount(_REFUSED_HALF_LIFE_S, clock())
        self.num_rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def check(self, num_completions: int) -> None:
        """Raises QueueOverflowError or MaxQueuedTokensError, with `retry_after_s`, if a request of
        so many completions is too much.
        """
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
            self._neighbours.tell(num_requests=outputs.num_unfinished + num_completions)

    def note_ended(self, num_completions: int) -> None:
        """So many completions have ended now."""
        self._ended.add(num_completions, self._clock())
        self.share_load()

    def share_load(self) -> None:
        """Let the neighbours know the load of this server."""
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
        if rate * _MOST_HINT_S < 1:
            return 1.0
        return min(_MOST_HINT_S, max(_LEAST_HINT_S, wanted / rate))
