"""Limits the failures of a step to the requests that cause them.

The runner names the rows of most failures. One that names no row (a processor for the whole batch,
a kernel) is attributed: the step is run again in halves, and the halves that fail in halves, until
a row that fails is alone. This is sound because a step changes nothing before it has sampled, and
cheap: without a failure it costs one `try`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

from quire.engine.core.features import Masks
from quire.errors import EngineDeadError
from quire.executor.abstract import Executor, LaunchedStep
from quire.step.columns import RunnerOutput, join_columns
from quire.step.faults import EarlierFailure, LateFailure, ProcessorFailure, RowFailures
from quire.step.plan import StepPlan
from quire.step.result import StepResult

logger = logging.getLogger(__name__)

ALONE = "the request made a step of the engine fail, alone too; the engine's log says how"
UNREAD = "the results of a step could not be read; the engine's log says why"


class FaultBoundary:
    """Launches steps on an executor.

    Invariant: `_failed` has the rows that failed and that no plan has removed since; a step that
    was planned ahead, before the scheduler knew of the failure, runs without them.
    """

    def __init__(self, executor: Executor, masks: Masks) -> None:
        self._executor = executor
        self._masks = masks
        self._failed: dict[int, str] = {}
        self._unread: deque[GuardedStep] = deque()

    def launch(self, plan: StepPlan) -> GuardedStep:
        """Start a step, and find the culprits at once if it fails.

        Raises EngineDeadError when the device has failed, or when the executor does not even take
        the plan's changes of rows.
        """
        try:
            step = self._guarded(plan)
        except EarlierFailure:
            # the device reports an error late, at the next launch: first find out whose it was,
            # then this step runs again
            for earlier in [*self._unread]:
                earlier.settle()
            step = self._guarded(plan)
        self._unread.append(step)
        return step

    def note_read(self, step: GuardedStep) -> None:
        self._unread.remove(step)

    def _guarded(self, plan: StepPlan) -> GuardedStep:
        step = GuardedStep(plan, self)
        if self._failed:
            # the row is another request's from now on
            for row in plan.removed:
                self._failed.pop(row, None)
            self._leave_out(step, [row for row in _rows(plan) if row in self._failed])
        self._run(step, without(plan, step.errors) if step.errors else plan)
        if not step.parts:
            # rows and blocks have changed hands in this plan, and the next plans count on it
            self._only_change(step, without(plan, _rows(plan)))
        return step

    def _run(self, step: GuardedStep, plan: StepPlan) -> None:
        if not (plan.decode_rows or plan.chunks):
            return
        try:
            self._start(step, plan)
        except (EngineDeadError, EarlierFailure):
            raise  # of the device, the group or another step, not of a row
        except RowFailures as failures:
            self._blame(step, failures.errors)
            # the others lose nothing: a step changes no memory that a repetition does not write
            # again
            self._run(step, without(plan, failures.errors))
        except Exception as error:
            self._attribute(step, plan, error)

    def run_again(self, step: GuardedStep, plan: StepPlan, error: Exception) -> None:
        """Find the culprits of a part that has failed after later steps were launched: its changes
        of rows have been made, and those of these steps that have rows of it did not run.
        """
        plan = msgspec.structs.replace(plan, removed=[], added=[], new_blocks=[])
        if isinstance(error, EngineDeadError):
            raise error
        if isinstance(error, RowFailures):
            self._blame(step, error.errors)
            self._run(step, without(plan, error.errors))
        else:
            self._attribute(step, plan, error)

    def run_after_all(self, step: GuardedStep, plan: StepPlan) -> None:
        """Run a part that did not run because it follows one that had failed, whose culprits are
        known by now: its changes of rows have been made.
        """
        plan = msgspec.structs.replace(plan, removed=[], added=[], new_blocks=[])
        self._leave_out(step, [row for row in _rows(plan) if row in self._failed])
        self._run(step, without(plan, step.errors))

    def _start(self, step: GuardedStep, plan: StepPlan) -> None:
        launched = self._executor.launch(plan)
        launched.sample(self._masks(plan, launched))
        step.parts.append((plan, launched))

    def _only_change(self, step: GuardedStep, plan: StepPlan) -> None:
        """Apply only the plan's changes of rows, on which later steps rely: no token can run."""
        try:
            self._start(step, plan)
        except (EngineDeadError, EarlierFailure):
            raise
        except Exception as error:
            raise EngineDeadError("The device does not run any step; see the log.") from error

    def _attribute(self, step: GuardedStep, plan: StepPlan, error: Exception) -> None:
        rows = _rows(plan)
        logger.error("step %d failed with rows %s", plan.step_id, rows, exc_info=error)
        if len(rows) == 1:
            text = str(error) if isinstance(error, ProcessorFailure) else ALONE
            self._blame(step, {rows[0]: text})
            return
        half = (len(rows) + 1) // 2
        self._run(step, without(plan, rows[half:]))
        self._run(step, without(plan, rows[:half]))

    def _blame(self, step: GuardedStep, errors: Mapping[int, str]) -> None:
        self._failed.update(errors)
        self._leave_out(step, errors)

    def _leave_out(self, step: GuardedStep, rows: Iterable[int]) -> None:
        step.errors.update((row, self._failed[row]) for row in rows)


class GuardedStep:
    """A step in flight: `parts` ran, the rows in `errors` did not."""

    def __init__(self, plan: StepPlan, boundary: FaultBoundary | None = None) -> None:
        """`boundary`: what finds the culprits of parts that fail late; None: none do."""
        self.plan = plan
        self._boundary = boundary
        self.parts: list[tuple[StepPlan, LaunchedStep]] = []
        self.errors: dict[int, str] = {}
        self._output: RunnerOutput | None = None

    def result(self) -> RunnerOutput:
        """Wait for the step's ids, in the plan's order. Raises only EngineDeadError."""
        if self._boundary is not None:
            self._boundary.note_read(self)
        return self.settle()

    def settle(self) -> RunnerOutput:
        """Wait for the results, which `result` returns then, and find culprits that show now."""
        if self._output is None:
            self._output = self._read_all()
        return self._output

    def _read_all(self) -> RunnerOutput:
        found = []
        while self.parts:
            plan, launched = self.parts.pop(0)
            try:
                found.append((plan, _read(plan, launched)))
            except LateFailure as failure:
                assert self._boundary is not None, "a part that may fail late"
                self._boundary.run_again(self, plan, failure.cause)
            except EarlierFailure:
                assert self._boundary is not None, "a part that may fail late"
                self._boundary.run_after_all(self, plan)
        if found and found[0][0] is self.plan:
            return found[0][1]
        return _merged(self.plan, found, self.errors)


def without(plan: StepPlan, rows: Collection[int]) -> StepPlan:
    """The step, with its changes, without the tokens of some rows."""
    kept = [place for place, row in enumerate(plan.decode_rows) if row not in rows]
    drafts = plan.decode_drafts
    return msgspec.structs.replace(
        plan,
        decode_rows=[plan.decode_rows[place] for place in kept],
        decode_drafts=None if drafts is None else [drafts[place] for place in kept],
        chunks=[chunk for chunk in plan.chunks if chunk.row not in rows],
    )


def _rows(plan: StepPlan) -> list[int]:
    return [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]


def _read(plan: StepPlan, launched: LaunchedStep) -> RunnerOutput:
    """Read a launched part, twice if necessary: reading changes nothing. Then its rows fail."""
    for _ in range(2):
        try:
            return launched.result()
        except (EngineDeadError, LateFailure, EarlierFailure):
            raise
        except Exception:
            logger.exception("failed to read the results of step %d", plan.step_id)
    errors = dict.fromkeys(_rows(plan), UNREAD)
    return RunnerOutput(StepResult(plan.step_id, [0] * len(plan.sampled_rows), errors))


def _merged(
    plan: StepPlan, parts: Sequence[tuple[StepPlan, RunnerOutput]], errors: Mapping[int, str]
) -> RunnerOutput:
    """One output for the whole plan; rows that did not run have the id 0."""
    ids = {row: [0] for row in plan.sampled_rows}
    ready = dict.fromkeys(ids, 0)
    for part, output in parts:
        for row, token_ids, num_drafts in _by_row(part, output.result):
            ids[row], ready[row] = token_ids, num_drafts
    counts = [len(token_ids) for token_ids in ids.values()]
    starts = dict(zip(ids, accumulate(counts, initial=0), strict=False))
    result = StepResult(plan.step_id, [i for each in ids.values() for i in each], dict(errors))
    if any(output.result.counts is not None for _, output in parts):
        result.counts, result.num_drafts = counts, list(ready.values())
    merged = RunnerOutput(result)
    columns = []
    for part, output in parts:
        result.errors.update(output.result.errors)
        result.nans.update(output.result.nans)
        result.failed_encodings = output.result.failed_encodings  # the same of all parts
        merged.parts += output.parts
        if output.logprobs is not None:
            rows = _by_row(part, output.result)
            places = [starts[row] + i for row, token_ids, _ in rows for i in range(len(token_ids))]
            output.logprobs.index = [places[index] for index in output.logprobs.index]
            columns.append(output.logprobs)
    merged.logprobs = join_columns(columns) if columns else None
    return merged


def _by_row(plan: StepPlan, result: StepResult) -> list[tuple[int, list[int], int]]:
    rows = plan.sampled_rows
    counts = result.counts or [1] * len(rows)
    ready = result.num_drafts or [0] * len(rows)
    ends = list(accumulate(counts, initial=0))
    return [(row, result.token_ids[ends[i] : ends[i + 1]], ready[i]) for i, row in enumerate(rows)]
