"""`logprobs` and `logprob_token_ids`: which columns a sampled token gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.ops.vocab_row import VocabRow
from quire.params import SamplingParams
from quire.runner.sampling.columns import LogprobEntry

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The columns beside the token's own: the `num_top` likeliest, or exactly `ids` [n] int64."""

    num_top: int
    ids: Tensor | None = None

    @staticmethod
    def of(params: SamplingParams, vocab_size: int, device: torch.device) -> LogprobRequest | None:
        """What `params` ask for; None if nothing."""
        if params.logprob_token_ids is not None:
            ids = torch.tensor(params.logprob_token_ids, dtype=torch.int64, device=device)
            return LogprobRequest(0, ids)
        if params.logprobs is None:
            return None
        return LogprobRequest(vocab_size if params.logprobs == -1 else params.logprobs)


def describe_token(
    row: VocabRow, token_id: int, request: LogprobRequest, *, normalize: bool
) -> LogprobEntry:
    """The entry of one token in a row of logits: log-softmax values, or the logits themselves.

    The token's rank is the number of entries >= its own. O(V) for the sum, the rest as `VocabRow`.
    """
    others = row.top(request.num_top) if request.ids is None else request.ids
    ids = torch.cat([others.new_tensor([token_id]), others])
    values = row.values[ids]
    rank = row.count_at_least(values[0].item())
    if normalize:
        values = (values - row.peak).sub_(row.log_sum())
    return LogprobEntry(ids, values, rank)


def only(row: VocabRow, ids: Tensor | None) -> VocabRow:
    """The row as it is after filtering: everything but `ids` at -inf (None: the row itself)."""
    if ids is None:
        return row
    values = torch.full_like(row.values, -math.inf)
    values[ids] = row.values[ids]
    return VocabRow(values)
