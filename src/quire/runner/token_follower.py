"""The head of rows that generate on a worker that does not sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.params import RequestParams
from quire.runner.batch import StepInputs
from quire.runner.grammar_mask import GrammarMask
from quire.runner.rows import Rows
from quire.runner.runner_output import RunnerOutput
from quire.scheduling.step import NewRow


class TokenFollower:
    """Puts the ids that the group's first worker draws into this worker's rows; results are that
    worker's to report.
    """

    def __init__(self, rows: Rows, group: WorkerGroup) -> None:
        self._rows = rows
        self._group = group

    def needs_host_ids(self, params: RequestParams) -> bool:
        """This worker never looks at ids on the host."""
        return False

    def add_row(self, new: NewRow) -> None:
        """Rows have no state here."""

    def remove_row(self, row: int) -> None:
        """There is none to forget."""

    def begin(self, inputs: StepInputs) -> FollowerStep:
        return FollowerStep(self._rows, self._group, inputs)


class FollowerStep:
    """The ids of one step."""

    moves_rows = False

    def __init__(self, rows: Rows, group: WorkerGroup, inputs: StepInputs) -> None:
        self._rows, self._group, self._inputs = rows, group, inputs

    def compute(self, hidden: Tensor, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Take the drawn ids; the worker that drew them has applied `mask`."""
        inputs = self._inputs
        assert inputs.drafts is None, "drafts are verified by one worker"
        count = len(inputs.sampled)
        if count:
            drawn = self._group.broadcast(hidden.new_empty(count, dtype=torch.int64))
            self._rows.write(inputs.sampled_rows, inputs.sampled_at, drawn)
        return []

    def advance(self) -> None:
        """The rows keep their own counts."""

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """The first worker reports."""
