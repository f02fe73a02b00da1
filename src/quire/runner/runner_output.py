"""The output of a step on the host: results of each kind of row, and columns for requested
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from quire.runner.sampling import SampledLogprobs
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


@dataclass(frozen=True, slots=True)
class PromptTensors:
    """`PromptColumns` that the device may still be computing."""

    handle: int
    token_ids: Tensor
    values: Tensor
    ranks: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `to_host` needs on the host."""
        return [self.token_ids, self.values, self.ranks]

    def to_host(self, values: Sequence[Tensor]) -> PromptColumns:
        """The columns, given the values of `tensors` on the host."""
        return PromptColumns(self.handle, *(value.numpy() for value in values))


@dataclass(frozen=True, slots=True)
class PooledRow:
    """The pooled result of one prompt: values [D], or [n, D] for its n tokens, float32."""

    handle: int
    values: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RoutedColumns:
    """The experts that a request's tokens from position `first` on were sent to: values [n, L, k],
    0 in layers without experts.
    """

    handle: int
    first: int
    values: np.ndarray[Any, Any]


@dataclass(slots=True)
class RunnerOutput:
    """The output of a step: `result` for the rows that generate, `pooled` for those whose complete
    prompt was pooled. Errors of both are in `result`. `logprobs.index` indexes the ids of the
    result. `routed` has the experts of tokens, where they are reported.
    """

    result: StepResult
    pooled: list[PooledRow] = field(default_factory=list)
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptColumns] = field(default_factory=list)
    routed: list[RoutedColumns] = field(default_factory=list)
