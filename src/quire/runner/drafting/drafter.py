"""The interface of what drafts: one object for all rows of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.models.decoder import HiddenStates
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Array
from quire.runner.rows import Rows
from quire.step.plan import NewRow


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step whose tokens are known, after the rows have advanced to its end.

    `sampled` [R]: the rows that got tokens, in order; `new_tokens[i]` are those of the i-th, the
    accepted drafts and the token after them. `drafts` [R]: how many drafts each verified.
    `limits[i]`: the most drafts that are wanted of the i-th row now.

    `inputs` and `states` are those of all rows that computed, prompts included: row r computed
    `inputs.counts[r]` tokens from `inputs.starts[r]` on, of which the last
    `drafts[i] + 1 - len(new_tokens[i])` were wrong drafts if it is the i-th that sampled. Tensors
    are valid until the drafter returns.
    """

    inputs: StepInputs
    states: HiddenStates
    sampled: Sequence[int]
    new_tokens: Sequence[Sequence[int]]
    drafts: Array
    limits: Sequence[int]


class Drafter(Protocol):
    """Guesses the next tokens of rows. Whatever it raises costs drafts only."""

    def add_row(self, new: NewRow) -> None:
        """A new or resumed request is in `new.row`. Its first `num_computed_tokens` tokens will be
        in no step: their K/V are in the cache.
        """
        ...

    def remove_row(self, row: int) -> None:
        """The request has left the row."""
        ...

    def propose(self, rows: Rows, step: VerifiedStep) -> Sequence[int]:
        """Write drafts of the sampled rows after their tokens (`Rows.write_drafts`); returns how
        many each has, at most its limit.

        Called after every step, also one in which no row samples.
        """
        ...
