"""How much may wait in front of an engine that serves: beyond it a request is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.output_processor import OutputProcessor
from quire.errors import MaxQueuedTokensError, QueueOverflowError

_HALF_LIFE_S = 10.0
_LEAST_HINT_S, _MOST_HINT_S = 0.1, 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most unfinished completions, and most prompt tokens of those without a first output."""

    num_requests: int
    num_tokens: int


class Admission:
    """Decides before anything is done for a request, so that saying no costs microseconds.

    The hint when to come back is how long as many completions took to end lately.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        limits: QueueLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outputs = outputs
        self._limits = limits
        self._clock = clock
        self._num_ended = 0.0
        self._since = self._noted = clock()
        self.num_rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    def check(self, num_completions: int) -> None:
        """Raises QueueOverflowError or MaxQueuedTokensError, with `retry_after_s`, if a request of
        so many completions is too much.
        """
        limits, outputs = self._limits, self._outputs
        excess = outputs.num_unfinished + num_completions - limits.num_requests
        if excess > 0:
            self.num_rejected["max_num_queued_reqs"] += 1
            raise QueueOverflowError(
                f"{outputs.num_unfinished} requests are unfinished, and the limit is "
                f"max_num_queued_reqs={limits.num_requests}. Try again later.",
                retry_after_s=self._hint_s(excess),
            )
        if outputs.num_queued_tokens >= limits.num_tokens:
            self.num_rejected["max_num_queued_tokens"] += 1
            raise MaxQueuedTokensError(
                f"Requests with {outputs.num_queued_tokens} prompt tokens wait, and the limit is "
                f"max_num_queued_tokens={limits.num_tokens}. Try again later.",
                retry_after_s=self._hint_s(1),
            )

    def note_ended(self, num_completions: int) -> None:
        """So many completions have ended now."""
        now = self._clock()
        self._fade(now)
        self._num_ended += num_completions

    def _hint_s(self, num_completions: int) -> float:
        now = self._clock()
        self._fade(now)
        if self._num_ended < 1:
            return 1.0
        seconds = min(now - self._since, 2 * _HALF_LIFE_S) / self._num_ended * num_completions
        return min(_MOST_HINT_S, max(_LEAST_HINT_S, seconds))

    def _fade(self, now: float) -> None:
        """Forget half of the past every ten seconds."""
        self._num_ended *= 0.5 ** ((now - self._noted) / _HALF_LIFE_S)
        self._noted = now
