"""The masks of a step: for each row whose request has a grammar, which tokens may come next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.grammar.bits import mask_words
from quire.grammar.constraint import Constraint, GrammarFailure
from quire.grammar.library import Matcher
from quire.runner.faults import RowFailures
from quire.runner.grammar_mask import GrammarMask
from quire.scheduling.request import Request
from quire.scheduling.step import StepPlan


class StepMasks:
    """Computes masks on the host, after a step's launch and before its sampling.

    `constrained` are the scheduler's requests with a grammar, by row.
    """

    def __init__(self, constrained: Mapping[int, Request], vocab_size: int) -> None:
        self._constrained = constrained
        self._words = mask_words(vocab_size)

    def of(self, plan: StepPlan) -> GrammarMask | None:
        """Compute the masks of the plan's sampled rows; None if no row has a grammar. A row with a
        grammar verifies no drafts.

        The same for a plan that is launched again. Raises RowFailures for grammars that failed.
        """
        if not self._constrained:
            return None
        rows, places, place = [], [], 0
        for row, num_drafts in zip(plan.sampled_rows, plan.sampled_drafts, strict=True):
            if row in self._constrained:
                assert num_drafts == 0, "a mask is made for one token of a row"
                rows.append(row)
                places.append(place)
            place += 1 + num_drafts
        if not places:
            return None
        masks = np.empty((len(places), self._words), dtype=np.int32)
        self._fill(masks, rows)
        return GrammarMask(places, masks)

    def _fill(self, masks: np.ndarray, rows: Sequence[int]) -> None:
        errors: dict[int, str] = {}
        matchers: list[tuple[Matcher, int]] = []
        constraints: list[Constraint] = []
        for index, row in enumerate(rows):
            request = self._constrained[row]
            constraint = request.grammar
            assert isinstance(constraint, Constraint)
            constraints.append(constraint)
            try:
                matcher = constraint.advance(request.output_token_ids)
            except GrammarFailure as failure:
                errors[row] = str(failure)
                continue
            if matcher is not None:
                matchers.append((matcher, index))
        if matchers and not errors:
            _fill(matchers, masks)
            errors = {rows[index]: text for matcher, index in matchers if (text := matcher.failure)}
        if errors:
            raise RowFailures(errors)
        for index, constraint in enumerate(constraints):
            constraint.restrict(masks[index])


def _fill(matchers: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
    """Call `GrammarLibrary.fill` of each library for its own matchers."""
    by_library: dict[int, list[tuple[Matcher, int]]] = {}
    for matcher, row in matchers:
        by_library.setdefault(id(matcher.library), []).append((matcher, row))
    for theirs in by_library.values():
        theirs[0][0].library.fill(theirs, masks)
