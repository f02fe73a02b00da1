"""Columns of log-probabilities on the device, and the sampled tokens of a step on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.step.columns import PAD_ID, LogprobColumns


@dataclass(slots=True)
class SampledLogprobs:
    """`LogprobColumns` that the device may still be computing: token_ids [M, W] int32, values
    [M, W] fp32, ranks [M] int32. index[m] says which of the sampled rows (or prompt positions)
    entry m belongs to.
    """

    index: list[int]
    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    counts: list[int]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `to_host` needs on the host."""
        return [self.token_ids, self.values, self.ranks]

    def to_host(self, values: Sequence[Tensor]) -> LogprobColumns:
        """The columns, given the values of `tensors` on the host."""
        token_ids, chances, ranks = (value.numpy() for value in values)
        return LogprobColumns(self.index, token_ids, chances, ranks, self.counts)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled ids [R] int64 in the order of the rows, and log-probabilities if some row asked; on
    the host.

    A row in `errors` has no token: its id is 0, and it has no entry in `logprobs`. `nans`: how many
    of a row's logits are NaN, for rows that have some.
    """

    token_ids: Tensor
    logprobs: LogprobColumns | None
    errors: dict[int, str]
    nans: dict[int, int] = field(default_factory=dict)


def empty_columns(index: list[int], counts: list[int], device: torch.device) -> SampledLogprobs:
    """Make columns for entries with `counts` columns each (not empty), filled with padding."""
    shape = (len(index), max(counts))
    token_ids = torch.full(shape, PAD_ID, dtype=torch.int32, device=device)
    values = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    ranks = torch.empty(len(index), dtype=torch.int32, device=device)
    return SampledLogprobs(index, token_ids, values, ranks, counts)
