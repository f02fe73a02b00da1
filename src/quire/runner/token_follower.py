"""The head of generating rows on a worker that shares its layers with the one that samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.models.decoder import HiddenStates
from quire.runner.batch import StepInputs
from quire.runner.forward.forward import Forward
from quire.runner.head import IdleHead
from quire.runner.rows import Rows
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask


class TokenFollower(IdleHead):
    """Writes the ids that the group's first worker draws into this worker's rows; that worker
    reports the results. What depends on these comes with a later step (`NewTokens`).
    """

    def __init__(self, rows: Rows, group: WorkerGroup, forward: Forward | None = None) -> None:
        """`forward` has run the step's model, and computes this worker's part of its scores; None:
        the first worker computes all of them.
        """
        super().__init__(("generate",))
        self._rows = rows
        self._group = group
        self._forward = forward

    def begin(self, inputs: StepInputs) -> FollowerStep:
        return FollowerStep(self._rows, self._group, self._forward, inputs)


class FollowerStep:
    """The ids of one step."""

    moves_rows = False

    def __init__(
        self, rows: Rows, group: WorkerGroup, forward: Forward | None, inputs: StepInputs
    ) -> None:
        self._rows, self._group, self._inputs = rows, group, inputs
        self._forward = forward

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Receive the drawn ids; the worker that drew them has applied `mask`."""
        inputs = self._inputs
        count = len(inputs.sampled)
        if count:
            if self._forward is not None:
                self._forward.logits(states.last, inputs.last)
            drawn = self._group.broadcast(states.last.new_empty(count, dtype=torch.int64))
            self._rows.write(inputs.sampled_rows, inputs.sampled_at, drawn)
        return []

    def advance(self) -> None:
        """Do nothing: the rows keep their own counts."""

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """Do nothing: the first worker reports."""
