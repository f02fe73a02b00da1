"""Drafts as the head of generating rows sees them: made after each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.errors import EngineDeadError
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Array
from quire.runner.drafting.drafter import Drafter, VerifiedStep
from quire.runner.drafting.pace import Pace
from quire.runner.rows import Rows
from quire.step.plan import NewRow

logger = logging.getLogger(__name__)

_MOST_FAILURES = 8
"""Failures in a row after which no more drafts are asked for."""


class Drafting:
    """A drafter, how many drafts it is asked for, and what becomes of its failures.

    A failure costs the drafts of a step, or those of a request that could not be added, and nothing
    else. A drafter that keeps failing is not asked again.
    """

    def __init__(
        self, drafter: Drafter, pace: Pace, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`pace` says how many drafts are wanted; `clock` gives seconds."""
        self.drafter: Drafter | None = drafter
        self.pace = pace
        self.clock = clock
        self._num_failures = 0
        self._without: set[int] = set()
        """Rows whose requests the drafter could not take."""

    def add_row(self, new: NewRow) -> None:
        if self.drafter is None:
            return
        try:
            self.drafter.add_row(new)
        except EngineDeadError:
            raise
        except Exception:
            self._without.add(new.row)
            self._note_failure()

    def remove_row(self, row: int) -> None:
        self.pace.forget(row)
        if self.drafter is None:
            return
        if row in self._without:
            self._without.discard(row)
            return
        try:
            self.drafter.remove_row(row)
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure()

    def limits(self, rows: Rows, sampled: Sequence[int]) -> list[int]:
        """Return how many drafts are wanted of each row: none at the end of its length."""
        if self.drafter is None:
            return [0] * len(sampled)
        left = np.maximum(0, rows.token_ids.shape[1] - 1 - rows.num_tokens[sampled])
        most: list[int] = left.tolist()
        if self._without:
            most = [0 if r in self._without else n for r, n in zip(sampled, most, strict=True)]
        return self.pace.limits(sampled, most)

    def note(
        self,
        inputs: StepInputs,
        sampled: Sequence[int],
        drafts: Array,
        right: Array,
        started: float,
    ) -> None:
        """Note how many of the `drafts` [R] of a step's sampled rows were right [R], and how long
        the step took since it `started`.
        """
        self.pace.note_accepted(sampled, drafts, right)
        num_tokens = int(inputs.counts.sum())
        # a step with prompts takes another time for as many tokens
        if num_tokens == len(inputs.sampled):
            self.pace.note_time(num_tokens, self.clock() - started)

    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        """Have drafts made; returns how many each sampled row has."""
        none = [0] * len(step.sampled)
        if self.drafter is None:
            return none
        start = self.clock()
        try:
            counts = list(self.drafter.propose(rows, step))
            assert len(counts) == len(none), "a count for each row"
            assert all(0 <= n <= most for n, most in zip(counts, step.limits, strict=True))
        # the device has failed, and not the drafter
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure()
            return none
        self._num_failures = 0
        self.pace.note_drafting(max(step.limits, default=0), self.clock() - start)
        return counts

    def _note_failure(self) -> None:
        self._num_failures += 1
        logger.exception("the drafter failed: a step goes without drafts")
        if self._num_failures >= _MOST_FAILURES:
            self.drafter = None
            logger.error(
                "The drafter has failed %d times in a row: no more drafts.", _MOST_FAILURES
            )
