"""The masks of a step: for each row whose request has a grammar, which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.errors import EngineError
from quire.grammar.bits import mask_words
from quire.grammar.constraint import Constraint, GrammarFailure
from quire.grammar.library import Matcher
from quire.params.structured import GRAMMAR_FAILED
from quire.scheduling.request import Request
from quire.step.faults import RowFailures
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan

logger = logging.getLogger(__name__)


class DraftedStep(Protocol):
    """A launched step, as far as its drafts are concerned."""

    def drafts(self, row: int, count: int) -> list[int]:
        """Return the first `count` drafts of a row."""
        ...


@dataclass(slots=True)
class _Row:
    """A constrained row: where its masks begin, and the drafts that its request may go on with."""

    row: int
    constraint: Constraint
    first: int
    drafts: list[int] = field(default_factory=list)


class StepMasks:
    """Computes masks on the host, after a step's launch and before its sampling.

    `constrained` are the scheduler's requests with a grammar, by row. A row with drafts has a mask
    for each of its positions, for its grammar after the drafts before.
    """

    def __init__(self, constrained: Mapping[int, Request], vocab_size: int) -> None:
        self._constrained = constrained
        self._words = mask_words(vocab_size)

    def of(self, plan: StepPlan, launched: DraftedStep) -> GrammarMask | None:
        """Compute the masks of the plan's sampled rows; None if no row has a grammar.

        The same for a plan that is launched again. Raises RowFailures for grammars that failed.
        """
        if not self._constrained:
            return None
        rows: list[_Row] = []
        places: list[int] = []
        place = 0
        for row, num_drafts in zip(plan.sampled_rows, plan.sampled_drafts, strict=True):
            if row in self._constrained:
                constraint = self._constrained[row].grammar
                assert isinstance(constraint, Constraint)
                drafts = launched.drafts(row, num_drafts) if num_drafts else []
                rows.append(_Row(row, constraint, len(places), drafts))
                places += range(place, place + 1 + num_drafts)
            place += 1 + num_drafts
        if not places:
            return None
        # every row is written: by its library, or by `restrict`
        masks = np.empty((len(places), self._words), dtype=np.int32)
        self._fill(masks, rows)
        drafted = [row for row in rows if row.drafts]
        unknown = _fill_ahead(masks, drafted) if drafted else []
        return GrammarMask(places, masks, [places[index] for index in unknown])

    def _fill(self, masks: np.ndarray, rows: Sequence[_Row]) -> None:
        """Fill the first mask of each row."""
        errors: dict[int, str] = {}
        matchers: list[tuple[Matcher, int]] = []
        row_at = {each.first: each.row for each in rows}
        for each in rows:
            try:
                matcher = each.constraint.advance(self._constrained[each.row].output_token_ids)
            except GrammarFailure as failure:
                errors[each.row] = str(failure)
                continue
            if matcher is not None:
                matchers.append((matcher, each.first))
        # the step is launched again without the rows that failed, so the others' masks would be
        # thrown away
        if matchers and not errors:
            _fill(matchers, masks)
            failures = ((row_at[index], matcher.failure) for matcher, index in matchers)
            errors = {row: f"{GRAMMAR_FAILED}: {text}" for row, text in failures if text}
        if errors:
            for text in errors.values():
                logger.warning("A request ends: %s", text)
            raise RowFailures(errors)
        for each in rows:
            each.constraint.restrict(masks[each.first])


def _fill_ahead(masks: np.ndarray, rows: Sequence[_Row]) -> list[int]:
    """Fill the masks after drafts, draft by draft for all rows at once; the constraints are then
    where they were. Returns the masks that nothing can come of: after a draft that its grammar does
    not allow, or that ends the text.
    """
    checkpoints = [each.constraint.checkpoint() for each in rows]
    unknown: list[int] = []
    going = list(rows)
    try:
        for ahead in range(max(len(each.drafts) for each in rows)):
            going, stopped = _advance(going, ahead)
            unknown += stopped
            filled = [(each.constraint.matcher, each.first + ahead + 1) for each in going]
            matchers = [(matcher, index) for matcher, index in filled if matcher is not None]
            try:
                if matchers:
                    _fill(matchers, masks)
            except EngineError:
                # it is not known which of them failed, so that none gets a sample after this draft
                unknown += [i for each in going for i in _masks_after(each, ahead)]
                break
            for each in going:
                each.constraint.restrict(masks[each.first + ahead + 1])
            failed = [each for each in going if each.constraint.has_failed]
            unknown += [i for each in failed for i in _masks_after(each, ahead)]
            going = [each for each in going if each not in failed]
    finally:
        for each, checkpoint in zip(rows, checkpoints, strict=True):
            # whether drafts are accepted is known after sampling, when the output brings them again
            each.constraint.return_to(checkpoint)
    if unknown:
        # what is drawn by them does not count, whatever it is
        masks[unknown] = -1
    return unknown


def _advance(rows: Sequence[_Row], ahead: int) -> tuple[list[_Row], list[int]]:
    """Advance rows by their next draft -> those that go on, and the masks of the others."""
    going: list[_Row] = []
    stopped: list[int] = []
    for each in rows:
        if ahead < len(each.drafts):
            if each.constraint.take_draft(each.drafts[ahead]):
                going.append(each)
            else:
                stopped += _masks_after(each, ahead)
    return going, stopped


def _masks_after(row: _Row, ahead: int) -> range:
    """The masks from the one after draft `ahead` on."""
    return range(row.first + ahead + 1, row.first + len(row.drafts) + 1)


def _fill(matchers: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
    """Call `GrammarLibrary.fill` of each library for its own matchers."""
    by_library: dict[int, list[tuple[Matcher, int]]] = {}
    for matcher, row in matchers:
        # one call for all rows of a library, which may have threads for them
        by_library.setdefault(id(matcher.library), []).append((matcher, row))
    for theirs in by_library.values():
        theirs[0][0].library.fill(theirs, masks)
