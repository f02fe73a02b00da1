"""Output of a pipeline stage that the next one reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.models.decoder import HiddenStates


@dataclass(frozen=True, slots=True)
class StageOutput:
    """`states`: the hidden states of a step after a stage's last layer, with the auxiliary states
    and the chosen experts of all layers so far; None: the step has no tokens.
    `failed_encodings`: as in `StepResult`, since the first stage encodes and the last one reports.
    """

    states: HiddenStates | None
    failed_encodings: Sequence[bytes] = ()
