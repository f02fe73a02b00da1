"""What the sampler hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAD_ID = -1


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities (or logits, by the engine's `logprobs_mode`) of M tokens in W columns.

    index[m] says which of the sampled rows (or prompt positions) entry m belongs to. Column 0 is
    the sampled (or prompt) token with its rank in `ranks` [M] int32; then the likeliest, largest
    first, or the ids that were asked for in their order. counts[m] columns are valid; the others
    hold the id -1 and the value -inf. token_ids [M, W] int32, values [M, W] fp32.
    """

    index: list[int]
    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    counts: list[int]


@dataclass(slots=True)
class SamplerOutput:
    """Sampled ids [R] int64 in the order of the rows, and log-probabilities if some row asked.

    A row named in `errors` has no token: what stands in its place is 0, and it has no entry in
    `logprobs`.
    """

    token_ids: Tensor
    logprobs: LogprobColumns | None = None
    errors: dict[int, str] = field(default_factory=dict)


def empty_columns(index: list[int], counts: list[int], device: torch.device) -> LogprobColumns:
    """Columns for entries of so many each (not empty), all of them padding."""
    shape = (len(index), max(counts))
    token_ids = torch.full(shape, PAD_ID, dtype=torch.int32, device=device)
    values = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    ranks = torch.empty(len(index), dtype=torch.int32, device=device)
    return LogprobColumns(index, token_ids, values, ranks, counts)


def join_columns(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The entries of all parts (not empty), one after the other."""
    width = max(part.token_ids.shape[1] for part in parts)
    return LogprobColumns(
        index=[index for part in parts for index in part.index],
        token_ids=torch.cat([_widened(part.token_ids, width, PAD_ID) for part in parts]),
        values=torch.cat([_widened(part.values, width, -torch.inf) for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        counts=[count for part in parts for count in part.counts],
    )


def _widened(columns: Tensor, width: int, padding: float) -> Tensor:
    return torch.nn.functional.pad(columns, (0, width - columns.shape[1]), value=padding)
