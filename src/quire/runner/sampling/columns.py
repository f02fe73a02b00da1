"""Columns of log-probabilities, and the sampled tokens of a step on the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAD_ID = -1


@dataclass(slots=True)
class SampledLogprobs:
    """Log-probabilities (or logits, by the engine's `logprobs_mode`) of M tokens in W columns.

    index[m] says which of the sampled rows (or prompt positions) entry m belongs to. Column 0 is
    the sampled (or prompt) token with its rank in `ranks` [M] int32; then the likeliest, largest
    first, or the requested ids in their order. counts[m] columns are valid; the others hold the id
    -1 and the value -inf. token_ids [M, W] int32, values [M, W] fp32.
    """

    index: list[int]
    token_ids: Tensor
    values: Tensor
    ranks: Tensor
    counts: list[int]

    def without(self, failed: Collection[int]) -> SampledLogprobs | None:
        """Return the entries of all other rows; None if there is no entry left."""
        if not any(row in failed for row in self.index):
            return self
        return self.at({row: row for row in self.index if row not in failed})

    def at(self, places: Mapping[int, int]) -> SampledLogprobs | None:
        """Return the entries of the rows in `places`, renumbered as given there; None if there is
        no entry.
        """
        kept = [m for m, row in enumerate(self.index) if row in places]
        if not kept:
            return None
        return SampledLogprobs(
            [places[self.index[m]] for m in kept],
            self.token_ids[kept],
            self.values[kept],
            self.ranks[kept],
            [self.counts[m] for m in kept],
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled ids [R] int64 in the order of the rows, and log-probabilities if some row asked; on
    the host.

    A row in `errors` has no token: its id is 0, and it has no entry in `logprobs`. `nans`: how many
    of a row's logits are NaN, for rows that have some.
    """

    token_ids: Tensor
    logprobs: SampledLogprobs | None
    errors: dict[int, str]
    nans: dict[int, int] = field(default_factory=dict)


def empty_columns(index: list[int], counts: list[int], device: torch.device) -> SampledLogprobs:
    """Make columns for entries with `counts` columns each (not empty), filled with padding."""
    shape = (len(index), max(counts))
    token_ids = torch.full(shape, PAD_ID, dtype=torch.int32, device=device)
    values = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    ranks = torch.empty(len(index), dtype=torch.int32, device=device)
    return SampledLogprobs(index, token_ids, values, ranks, counts)


def join_columns(parts: Sequence[SampledLogprobs]) -> SampledLogprobs:
    """Concatenate the entries of all parts (not empty)."""
    width = max(part.token_ids.shape[1] for part in parts)
    return SampledLogprobs(
        index=[index for part in parts for index in part.index],
        token_ids=torch.cat([_widened(part.token_ids, width, PAD_ID) for part in parts]),
        values=torch.cat([_widened(part.values, width, -torch.inf) for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        counts=[count for part in parts for count in part.counts],
    )


def _widened(columns: Tensor, width: int, padding: float) -> Tensor:
    return torch.nn.functional.pad(columns, (0, width - columns.shape[1]), value=padding)
