"""One request's constraint while it runs: the state of its output, and what may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import EngineError, RequestError
from quire.grammar.bits import forbid
from quire.grammar.library import Form, GrammarError, Matcher
from quire.grammar.prelude import Prelude, PreludeState, Stage
from quire.grammar.thinking import ThinkingBudget
from quire.grammar.vocabulary import Vocabulary
from quire.params.structured import GRAMMAR_FAILED


class GrammarFailure(RequestError):
    """A request's grammar failed while it ran; the text is fit for the one who sent it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a constraint before drafts, to return to after them."""

    matcher: Matcher | None
    can_be_form: bool
    num_taken: int
    prelude: PreludeState | None
    budget: tuple[int | None, list[int]] | None


class Constraint:
    """A function of the request's output tokens alone, which is all that a preempted, resumed or
    restarted request needs: tokens that are new here are replayed.

    `vocabulary` is known once the grammar is compiled. `prelude` makes what follows the output up
    to its form (None: it begins at once), when all of `needs` are done. `may_end` False: the ids
    that end a text are never drawn, the request ends with its grammar. `budget` bounds a reasoning
    before the form, or all of them without one (`compiled` None).
    """

    def __init__(
        self,
        compiled: Future[Form] | None,
        *,
        vocabulary: Callable[[], Vocabulary] | None = None,
        prelude: Callable[[], Prelude] | None = None,
        needs: Sequence[Future[Any]] = (),
        may_end: bool = True,
        budget: ThinkingBudget | None = None,
    ) -> None:
        self._compiled = compiled
        self._needs = [*([] if compiled is None else [compiled]), *needs]
        self._matcher: Matcher | None = None
        self._vocabulary = vocabulary
        self._make_prelude = prelude
        self._prelude: Prelude | None = None
        self._may_end = may_end
        self._can_be_form = compiled is not None
        """Whether the output so far is a beginning of the form, as far as is known."""
        self._budget = budget
        self._num_taken = 0
        self._num_ahead: int | None = 0
        """Drafts that the matcher of the checkpoint has taken; None if it failed at one."""
        self._at_checkpoint: Matcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or known to be wrong."""
        return all(each.done() for each in self._needs)

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        wait(self._needs, timeout_s)

    def has_ended(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the text is complete and nothing may follow. Raises GrammarFailure."""
        matcher = self.advance(output_token_ids)
        return matcher is not None and matcher.has_ended

    def advance(self, output_token_ids: Sequence[int]) -> Matcher | None:
        """Advance to the end of these tokens and return the matcher; None where the form cannot
        begin yet.

        Raises GrammarFailure, from then on each time.
        """
        if self._compiled is None:
            if self._budget is not None:
                self._budget.take_in(output_token_ids)
            return None
        try:
            if self._matcher is None:
                self._begin()
            self._take_in(output_token_ids)
        except EngineError as error:
            raise GrammarFailure(
                f"{GRAMMAR_FAILED}: {error}", parameter="structured_outputs"
            ) from None
        return self.matcher

    @property
    def matcher(self) -> Matcher | None:
        """The matcher where it is now; None where the form cannot begin yet."""
        return self._matcher if self._can_be_form else None

    @property
    def has_failed(self) -> bool:
        """Whether the matcher can no longer be used."""
        return self._matcher is not None and self._matcher.failure is not None

    def checkpoint(self) -> Checkpoint:
        """Return its state, for `return_to` after drafts."""
        budget = None if self._budget is None else self._budget.mark()
        prelude = None if self._prelude is None else self._prelude.state()
        # the matcher of this moment: a prelude may replace it during the drafts
        self._num_ahead, self._at_checkpoint = 0, self._matcher
        return Checkpoint(self._matcher, self._can_be_form, self._num_taken, prelude, budget)

    def take_draft(self, token_id: int) -> bool:
        """Advance by a draft. Returns False if nothing can come after it: it is not allowed, or
        ends the text, or the matcher has failed.
        """
        if self._compiled is None and self._budget is not None:
            self._budget.take(token_id)
        if self._matcher is None:
            return True
        try:
            is_allowed = self._take(token_id)
        except EngineError:
            self._num_ahead = None
            return False
        return is_allowed and not (self._can_be_form and self._matcher.has_ended)

    def return_to(self, checkpoint: Checkpoint) -> None:
        """Go back to a place before drafts. A matcher that cannot is made anew from the output."""
        if self._budget is not None and checkpoint.budget is not None:
            self._budget.return_to(checkpoint.budget)
        if self._prelude is not None and checkpoint.prelude is not None:
            self._prelude.return_to(checkpoint.prelude)
        self._can_be_form, self._num_taken = checkpoint.can_be_form, checkpoint.num_taken
        self._matcher, num_ahead = checkpoint.matcher, self._num_ahead
        if self._matcher is None or num_ahead == 0:
            return
        try:
            if num_ahead is None or self.has_failed:
                raise GrammarError("a draft made it fail")
            self._matcher.roll_back(num_ahead)
        except EngineError:
            self._matcher = None

    def restrict(self, mask: np.ndarray) -> None:
        """Correct a mask [ceil(V/32)] int32, filled where there is a matcher, by what may come
        before the form and by the request's own rule of where its text may end.
        """
        stage = Stage.OVER if self._prelude is None else self._prelude.stage
        if self._compiled is None:
            mask[:] = -1
        else:
            if not self._can_be_form:
                mask[:] = 0
            if self._prelude is not None and stage is not Stage.OVER:
                self._prelude.restrict(mask)
            if not (self._can_be_form and self._may_end):
                # the grammar would allow them where its text may end
                for index in self._known_vocabulary.eos_ids:
                    forbid(mask, index)
        if self._budget is not None and (self._compiled is None or stage is Stage.INSIDE):
            self._budget.restrict(mask)

    @property
    def _has_begun(self) -> bool:
        return self._prelude is None or self._prelude.stage is Stage.OVER

    @property
    def _known_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "a grammar needs a vocabulary"
        return self._vocabulary()

    def _begin(self) -> None:
        self._matcher = self._new_matcher()
        self._num_taken = 0
        if self._budget is not None:
            self._budget.restart()
        self._prelude = None if self._make_prelude is None else self._make_prelude()
        self._can_be_form = self._prelude is None or self._prelude.stage is Stage.OPENING

    def _new_matcher(self) -> Matcher:
        assert self._compiled is not None
        # it is ready; a wait would be a fault, and this raises instead
        return self._compiled.result(timeout=0).matcher()

    def _take_in(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None
        while self._num_taken < len(token_ids) and not self._has_begun:
            self._num_taken += 1
            if not self._take(token_ids[self._num_taken - 1]):
                raise GrammarError("the output left the grammar")
        if self._num_taken < len(token_ids):
            new = token_ids[self._num_taken :]
            self._num_taken = len(token_ids)
            self._matcher.consume(new)

    def _take(self, token_id: int) -> bool:
        """Advance by one token; returns whether it is allowed."""
        assert self._matcher is not None
        if self._prelude is None or self._has_begun:
            return self._try(token_id)
        was_opening = self._prelude.stage is Stage.OPENING
        self._prelude.take(token_id)
        stage: Stage = self._prelude.stage
        if self._budget is not None:
            self._budget.take(token_id)
            if was_opening and stage is Stage.INSIDE:
                self._budget.open()
        if was_opening and stage is not Stage.INSIDE:
            self._can_be_form = self._can_be_form and self._try(token_id)
            return self._can_be_form or stage is Stage.OPENING
        if was_opening:  # what may have been the form was an opening
            self._matcher = self._new_matcher()
        self._can_be_form = stage is Stage.OVER
        return True

    def _try(self, token_id: int) -> bool:
        assert self._matcher is not None
        is_allowed = self._matcher.try_token(token_id)
        # tokens that another matcher has taken must not be undone in this one
        if is_allowed and self._num_ahead is not None and self._matcher is self._at_checkpoint:
            self._num_ahead += 1
        return is_allowed
