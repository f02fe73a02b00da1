"""What gives a row its results: the language model's head with its sampler, or a pooler.

A head serves the rows of one kind of request, which is the type of their parameters. It takes part
in a step three times: before the model runs it stages inputs, then it computes results from the
hidden states, and at the end it reports them on the host. `Heads` knows which head each row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.errors import NotBuiltYet
from quire.params import RequestParams
from quire.runner.batch import StepInputs
from quire.runner.grammar_mask import GrammarMask
from quire.runner.runner_output import RunnerOutput
from quire.scheduling.step import NewRow


class HeadStep(Protocol):
    """A head's part of one launch of a step.

    The methods are called once each, in the order in which they stand here. A step that fails
    before `advance` is launched again, with a new object.
    """

    @property
    def moves_rows(self) -> bool:
        """Whether `report` moves the rows to the end of the step, because that depends on the
        results. Valid after `compute`.
        """
        ...

    def compute(self, hidden: Tensor, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Queue the work on the step's hidden states [T, C] -> the tensors that `report` needs on
        the host.

        `mask` constrains sampled rows. The rows stand where the step's tokens start. What this
        changes must not affect a second launch.
        """
        ...

    def advance(self) -> None:
        """The step has succeeded. Does not raise."""
        ...

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """Add results, and errors by row, to `output`; `values` are `compute`'s tensors on the
        host. By then the rows may belong to other requests.
        """
        ...


class RowHead(Protocol):
    """Serves the rows of one kind of request."""

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Must a request with these parameters not be scheduled ahead of its last id?"""
        ...

    def add_row(self, new: NewRow) -> None:
        """A request of this kind enters `new.row`. If this raises, nothing is kept."""
        ...

    def remove_row(self, row: int) -> None:
        """The request leaves the row."""
        ...

    def begin(self, inputs: StepInputs) -> HeadStep | None:
        """Stage what the device needs of this head in a step; None when no row of the step is its
        own.
        """
        ...


class Heads:
    """The heads of a runner, and which of them each row has: a part of the rows."""

    def __init__(self) -> None:
        self._by_kind: dict[type[RequestParams], RowHead] = {}
        self._of_row: dict[int, RowHead] = {}

    def register(self, kind: type[RequestParams], head: RowHead) -> None:
        """Let `head` serve the requests whose parameters are of this type, from now on."""
        assert kind not in self._by_kind, f"{kind.__name__} has a head"
        self._by_kind[kind] = head

    def of(self, params: RequestParams) -> RowHead:
        """The head for a request. Raises NotBuiltYet when the model has none for its kind."""
        head = self._by_kind.get(type(params))
        if head is None:
            raise NotBuiltYet("params", params, "This model has no head for such requests.")
        return head

    def add_row(self, new: NewRow) -> None:
        head = self.of(new.params)
        head.add_row(new)
        self._of_row[new.row] = head

    def remove_row(self, row: int) -> None:
        self._of_row.pop(row).remove_row(row)

    def begin(self, inputs: StepInputs) -> list[HeadStep]:
        """The parts that heads have in a step."""
        steps = [head.begin(inputs) for head in self._by_kind.values()]
        return [step for step in steps if step is not None]
