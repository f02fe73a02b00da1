"""What a step brings to the host: the scheduler's part, and columns for the people who asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.runner.sampling import LogprobColumns
from quire.scheduling.step import StepResult


@dataclass(slots=True)
class PromptColumns:
    """A whole prompt's log-probabilities: row i describes prompt token i + 1, column 0 the token
    itself. token_ids [n, W] int32, values [n, W] fp32, ranks [n] int32 of column 0.
    """

    handle: int
    token_ids: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]


@dataclass(slots=True)
class StepOutput:
    """`logprobs.index` counts the step's sampled rows."""

    result: StepResult
    logprobs: LogprobColumns | None = None
    prompt_logprobs: list[PromptColumns] = field(default_factory=list)
