"""A head computes the results of rows: the language model's head with its sampler, or a pooler.

A head serves the rows of one kind of request, which is the type of their parameters. It takes part
in a step three times: before the model runs it stages inputs, then it computes results from the
hidden states, and at the end it reports them on the host. The
runner knows which head each row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.models.decoder import HiddenStates
from quire.params import RequestParams
from quire.runner.batch import StepInputs
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NewRow


class HeadStep(Protocol):
    """A head's part of one launch of a step.

    The methods are called once each, in the order of their definition. A step that fails
    before `advance` is launched again, with a new object.
    """

    @property
    def moves_rows(self) -> bool:
        """Whether `report` advances the rows to the end of the step, because that depends on the
        results. Valid after `compute`.
        """
        ...

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Queue the work on the step's hidden states -> the tensors that `report` needs on the
        host.

        `mask` constrains sampled rows. The rows are where the step's tokens start. Changes made
        here must not affect a second launch.
        """
        ...

    def advance(self) -> None:
        """Note that the step has succeeded. Does not raise."""
        ...

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """Add results, and errors by row, to `output`; `values` are `compute`'s tensors on the
        host. By then the rows may belong to other requests.
        """
        ...


class Watcher(Protocol):
    """Takes part in the steps of all rows, besides the head that each row has."""

    def add_row(self, new: NewRow) -> None:
        """Add a request of this kind in `new.row`. If this raises, nothing is kept."""
        ...

    def remove_row(self, row: int) -> None:
        """The request leaves the row."""
        ...

    def begin(self, inputs: StepInputs) -> HeadStep | None:
        """Stage what the device needs for a step; None if there is nothing to do in it."""
        ...


class RowHead(Watcher, Protocol):
    """Serves the rows of one kind of request, and has a part in the steps that have such rows."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of such requests, under the names of the field."""
        ...

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Whether a request with these parameters must not be scheduled ahead of its last id."""
        ...


class IdleHead:
    """Serves rows that have no results on this worker: a later pipeline stage computes them."""

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks

    def needs_host_ids(self, params: RequestParams) -> bool:
        return False

    def add_row(self, new: NewRow) -> None:
        """Do nothing: this head has no state per row."""

    def remove_row(self, row: int) -> None:
        """Do nothing: this head has no state per row."""

    def begin(self, inputs: StepInputs) -> HeadStep | None:
        return None
