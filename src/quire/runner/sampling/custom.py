"""Runs the custom logits processors of an engine on the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from quire.params import SamplingParams
from quire.runner.sampling.batch_update import Layout, Member
from quire.runner.sampling.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from quire.step.faults import ProcessorFailure, contained


class CustomProcessors:
    """Updates each processor with the rows of a step, applies it, and keeps the ids that it reads.

    Rows that are not sampled in a step are not in the batch of that step: they are removed and
    added again with all their output, as after a preemption.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)
        self._layouts = [Layout() for _ in processors]
        self._members: dict[int, Member] = {}

    def __bool__(self) -> bool:
        return bool(self._processors)

    def needs_host_ids(self, params: SamplingParams) -> bool:
        """Whether some processor reads this request's output ids."""
        try:
            return any(processor.needs_host_ids(params) for processor in self._processors)
        except BaseException as error:
            raise ProcessorFailure(contained(error)) from error

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        if self._processors:
            member = Member(params, list(prompt_token_ids), list(output_token_ids))
            self._members[row] = member

    def remove(self, row: int) -> None:
        self._members.pop(row, None)

    def members(self, rows: Sequence[int]) -> list[Member]:
        """Return the requests that are in these rows now; their ids grow as tokens become final.
        Empty without processors.
        """
        return [self._members[row] for row in rows] if self._processors else []

    def must_run(self, *, is_all_greedy: bool) -> bool:
        """Whether a step needs `apply`: not if no processor can move the largest logit."""
        if not is_all_greedy:
            return bool(self._processors)
        try:
            return not all(processor.is_argmax_invariant() for processor in self._processors)
        except BaseException as error:
            raise ProcessorFailure(contained(error)) from error

    @property
    def take_drafts(self) -> bool:
        """Whether all of them see one row at a time, and can be called for several positions."""
        return all(map(_sees_rows_alone, self._processors))

    def apply_to_drafts(
        self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, dict[int, str]]:
        """Run the requests' callables on logits [M, V] of rows [R], where row i has the position of
        its next token, and then one after each of `drafts[i]` -> logits [M, V], errors by index.
        """
        members = [self._members[row] for row in rows]
        starts = list(accumulate((1 + len(each) for each in drafts), initial=0))
        errors: dict[int, str] = {}
        for processor, layout in zip(self._processors, self._layouts, strict=True):
            assert isinstance(processor, AdapterLogitsProcessor), "they see rows alone"
            try:
                processor.update_state(layout.update_to(members))
                layout.settle(members)
                for index in processor.req_info:
                    at, ahead = starts[index], drafts[index]
                    errors |= _run_ahead(processor, index, members[index], logits, at, ahead)
            except BaseException as error:
                raise ProcessorFailure(contained(error)) from error
        return logits, errors

    def apply(self, logits: Tensor, rows: Sequence[int]) -> tuple[Tensor, dict[int, str]]:
        """Run all processors on logits [R, V] (may be edited) -> logits [R, V], errors by index.

        Raises ProcessorFailure for a failure that names no row; a later call starts with a full
        update.
        """
        members = [self._members[row] for row in rows]
        errors: dict[int, str] = {}
        for processor, layout in zip(self._processors, self._layouts, strict=True):
            try:
                processor.update_state(layout.update_to(members))
                layout.settle(members)
                logits = _same_shape(processor.apply(logits), logits, processor)
            except BaseException as error:
                raise ProcessorFailure(contained(error)) from error
            if isinstance(processor, AdapterLogitsProcessor):
                errors |= processor.errors
        return logits, errors


def _sees_rows_alone(processor: LogitsProcessor) -> bool:
    own = type(processor)
    return (
        isinstance(processor, AdapterLogitsProcessor)
        and own.apply is AdapterLogitsProcessor.apply
        and own.update_state is AdapterLogitsProcessor.update_state
    )


def _run_ahead(
    processor: AdapterLogitsProcessor,
    index: int,
    member: Member,
    logits: Tensor,
    at: int,
    drafts: Sequence[int],
) -> dict[int, str]:
    """Run one request's callable on its positions from `at` on; it sees the drafts before each as
    output. Returns errors by position.
    """
    num_known, errors = len(member.output_ids), {}
    try:
        for ahead in range(len(drafts) + 1):
            error = processor.apply_to(index, logits, at + ahead)
            if error is not None:
                errors[at + ahead] = error
                break
            member.output_ids += drafts[ahead : ahead + 1]
    finally:
        del member.output_ids[num_known:]
    return errors


def _same_shape(result: Tensor, logits: Tensor, processor: LogitsProcessor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        raise TypeError(
            f"{type(processor).__name__}.apply must return logits of shape {tuple(logits.shape)}, "
            f"not {result!r:.80}"
        )
    return result.float()
