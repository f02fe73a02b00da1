"""Drafts as the head of generating rows sees them: made after each step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.errors import EngineDeadError
from quire.runner.drafting.drafter import Drafter, VerifiedStep
from quire.runner.rows import Rows
from quire.scheduling.step import NewRow

logger = logging.getLogger(__name__)

_MOST_FAILURES = 8
"""In a row, after which no more drafts are asked for."""


class Drafting:
    """A drafter, how many drafts it is asked for, and what becomes of its failures.

    A failure costs the drafts of a step, or those of a request that could not be added, and nothing
    else. A drafter that keeps failing is not asked again.
    """

    def __init__(self, drafter: Drafter, num_tokens: int) -> None:
        """num_tokens: the most drafts of a row in a step."""
        self._drafter: Drafter | None = drafter
        self._num_tokens = num_tokens
        self._num_failures = 0
        self._without: set[int] = set()
        """Rows whose requests the drafter could not take."""

    def add_row(self, new: NewRow) -> None:
        """A request has got a row."""
        if self._drafter is None:
            return
        try:
            self._drafter.add_row(new)
        except EngineDeadError:
            raise
        except Exception:
            self._without.add(new.row)
            self._note_failure()

    def remove_row(self, row: int) -> None:
        """A request has left its row."""
        if self._drafter is None:
            return
        if row in self._without:
            self._without.discard(row)
            return
        try:
            self._drafter.remove_row(row)
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure()

    def limits(self, rows: Rows, sampled: Sequence[int]) -> list[int]:
        """Return how many drafts are wanted of each row: none at the end of its length."""
        longest = rows.token_ids.shape[1] - 1
        left = longest - rows.num_tokens[sampled]
        most = [max(0, min(self._num_tokens, n)) for n in left.tolist()]
        if self._without:
            most = [0 if r in self._without else n for r, n in zip(sampled, most, strict=True)]
        return most

    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        """Have drafts made; returns how many each sampled row has."""
        none = [0] * len(step.sampled)
        if self._drafter is None:
            return none
        try:
            counts = list(self._drafter.propose(rows, step))
            assert len(counts) == len(none), "a count for each row"
            assert all(0 <= n <= most for n, most in zip(counts, step.limits, strict=True))
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure()
            return none
        self._num_failures = 0
        return counts

    def _note_failure(self) -> None:
        """Log the exception that is being handled."""
        self._num_failures += 1
        logger.exception("the drafter failed: a step goes without drafts")
        if self._num_failures >= _MOST_FAILURES:
            self._drafter = None
            logger.error(
                "The drafter has failed %d times in a row: no more drafts.", _MOST_FAILURES
            )
