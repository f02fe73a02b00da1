"""One request's constraint while it runs: the state of its output, and what may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from quire.errors import EngineError, RequestError
from quire.grammar.bits import forbid
from quire.grammar.library import Form, GrammarError, Matcher
from quire.grammar.thinking import ThinkingBudget
from quire.grammar.vocabulary import Vocabulary
from quire.params.structured import GRAMMAR_FAILED


class GrammarFailure(RequestError):
    """A request's grammar failed while it ran; the text is fit for the one who sent it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a constraint is, its matcher aside."""

    has_begun: bool
    tail: list[int]
    num_taken: int
    budget: tuple[int | None, list[int]] | None


class Constraint:
    """A function of the request's output tokens alone, which is all that a preempted, resumed or
    restarted request needs: tokens that are new here are replayed.

    `vocabulary` is known once the grammar is compiled. `starts_after` is the text, or the ids,
    after whose first occurrence the structured output begins (None: at once). `may_end` False: the
    ids that end a text are never drawn, the request ends with its grammar. `budget` bounds a
    reasoning before the form, or without one (`compiled` None).
    """

    def __init__(
        self,
        compiled: Future[Form] | None,
        *,
        vocabulary: Callable[[], Vocabulary] | None = None,
        starts_after: str | Sequence[int] | None = None,
        may_end: bool = True,
        budget: ThinkingBudget | None = None,
    ) -> None:
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._vocabulary = vocabulary
        self._is_text = isinstance(starts_after, str)
        self._mark = _marked(starts_after)
        self._tail: list[int] = []
        self._may_end = may_end
        self._has_begun = compiled is not None and not self._mark
        self._budget = budget
        self._num_taken = 0
        self._num_ahead: int | None = 0
        """Drafts that the matcher has taken; None if it failed at one."""

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or known to be wrong."""
        return self._compiled is None or self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        if self._compiled is None:
            return
        try:
            self._compiled.exception(timeout_s)
        except TimeoutError:
            return

    def has_ended(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the text is complete and nothing may follow. Raises GrammarFailure."""
        matcher = self.advance(output_token_ids)
        return matcher is not None and matcher.has_ended

    def advance(self, output_token_ids: Sequence[int]) -> Matcher | None:
        """Advance to the end of these tokens and return the matcher; None before the form begins.

        Raises GrammarFailure, from then on each time.
        """
        if self._budget is not None:
            self._budget.take_in(output_token_ids)
        if self._compiled is None:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._compiled.result(timeout=0).matcher()
            self._take_in(self._matcher, output_token_ids)
        except EngineError as error:
            raise GrammarFailure(
                f"{GRAMMAR_FAILED}: {error}", parameter="structured_outputs"
            ) from None
        return self._matcher if self._has_begun else None

    @property
    def matcher(self) -> Matcher | None:
        """The matcher where it is now; None before the form begins."""
        return self._matcher if self._has_begun else None

    @property
    def has_failed(self) -> bool:
        """Whether the matcher can no longer be used."""
        return self._matcher is not None and self._matcher.failure is not None

    def mark(self) -> Mark:
        """Return where it is, for `return_to` after drafts."""
        budget = None if self._budget is None else self._budget.mark()
        self._num_ahead = 0
        return Mark(self._has_begun, list(self._tail), self._num_taken, budget)

    def take_draft(self, token_id: int) -> bool:
        """Advance by a draft. Returns False if nothing can come after it: it is not allowed, or
        ends the text, or the matcher has failed.
        """
        if self._budget is not None:
            self._budget.take(token_id)
        if self._compiled is None or self._matcher is None:
            return True
        if not self._has_begun:
            self._num_taken = 0
            self._look_for_beginning([token_id])
            return True
        try:
            is_allowed = self._matcher.try_token(token_id)
        except EngineError:
            self._num_ahead = None
            return False
        if is_allowed and self._num_ahead is not None:
            self._num_ahead += 1
        return is_allowed and not self._matcher.has_ended

    def return_to(self, mark: Mark) -> None:
        """Go back to a place before drafts. A matcher that cannot is made anew from the output."""
        self._has_begun, self._tail, self._num_taken = mark.has_begun, mark.tail, mark.num_taken
        if self._budget is not None and mark.budget is not None:
            self._budget.return_to(mark.budget)
        if self._matcher is None or self._num_ahead == 0:
            return
        try:
            if self._num_ahead is None or self.has_failed:
                raise GrammarError("a draft made it fail")
            self._matcher.roll_back(self._num_ahead)
        except EngineError:
            self._matcher, self._num_taken, self._tail = None, 0, []
            self._has_begun = not self._mark

    def restrict(self, mask: np.ndarray) -> None:
        """Correct a filled mask [ceil(V/32)] int32 by the request's own rule of where its text may
        end.
        """
        if not self._has_begun:
            mask[:] = -1
        if self._compiled is not None and not (self._has_begun and self._may_end):
            for index in self._known_vocabulary.eos_ids:
                forbid(mask, index)
        if self._budget is not None and not self._has_begun:
            self._budget.restrict(mask)

    @property
    def _known_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "a grammar needs a vocabulary"
        return self._vocabulary()

    def _take_in(self, matcher: Matcher, token_ids: Sequence[int]) -> None:
        if not self._has_begun:
            self._look_for_beginning(token_ids)
        if self._has_begun and self._num_taken < len(token_ids):
            new = token_ids[self._num_taken :]
            self._num_taken = len(token_ids)
            matcher.consume(new)

    def _look_for_beginning(self, token_ids: Sequence[int]) -> None:
        mark, tail = self._mark, self._tail
        for place in range(self._num_taken, len(token_ids)):
            index = token_ids[place]
            tail += self._known_vocabulary.tokens[index] if self._is_text else (index,)
            self._num_taken = place + 1
            ends = range(len(mark), len(tail) + 1)
            if any(tail[end - len(mark) : end] == mark for end in ends):
                self._has_begun = True
                return
            del tail[: max(0, len(tail) - len(mark) + 1)]


def _marked(mark: str | Sequence[int] | None) -> list[int]:
    return list(mark.encode() if isinstance(mark, str) else mark or ())
