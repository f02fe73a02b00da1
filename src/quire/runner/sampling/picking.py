"""How tokens are picked once the logits are edited: many rows together, or one with filters."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.sample import draw, draw_rows, greedy, survivors
from quire.ops.vocab_row import VocabRow
from quire.params import SamplingParams
from quire.runner.sampling.columns import LogprobEntry
from quire.runner.sampling.logprobs import (
    LogprobRequest,
    LogprobsMode,
    describe_token,
    only,
)


class Way(enum.Enum):
    """Rows of the first two kinds are computed together, a row of the third alone."""

    LARGEST = enum.auto()
    UNFILTERED = enum.auto()
    ALONE = enum.auto()


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request asks for behind the editing of its logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: LogprobRequest | None
    way: Way

    @staticmethod
    def of(params: SamplingParams, vocab_size: int, device: torch.device) -> Choice:
        """The choice that `params` describe."""
        logprobs = LogprobRequest.of(params, vocab_size, device)
        is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        if logprobs is not None or (params.temperature > 0.0 and is_filtered):
            way = Way.ALONE
        else:
            way = Way.UNFILTERED if params.temperature > 0.0 else Way.LARGEST
        return Choice(params.temperature, params.top_k, params.top_p, params.min_p, logprobs, way)


@dataclass(frozen=True, slots=True)
class Pick:
    """A row's token; the largest of its logits, which must be finite for it to have a meaning."""

    token_id: int
    peak: float
    entry: LogprobEntry | None = None


def pick_largest(values: Sequence[Tensor]) -> list[Pick]:
    """The largest logit of each row [V]."""
    token_ids, peaks = greedy(_stacked(values))
    return [Pick(*found) for found in zip(token_ids.tolist(), peaks.tolist(), strict=True)]


def pick_unfiltered(
    values: Sequence[Tensor], temperatures: Sequence[float], hashes: Tensor, keys: Tensor
) -> list[Pick]:
    """A draw from each row [V]; hashes [V], keys [R, 2]."""
    logits = _stacked(values)
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None]
    token_ids, peaks = draw_rows(logits, hashes, keys)
    return [Pick(*found) for found in zip(token_ids.tolist(), peaks.tolist(), strict=True)]


def pick_alone(
    choice: Choice, raw: Tensor, values: Tensor, hashes: Tensor, key: Tensor, mode: LogprobsMode
) -> Pick:
    """The token of one row with its filters and log-probabilities.

    raw, values [V]: its logits before and after editing, the same object if nothing edits them.
    """
    divided = values if choice.temperature in (0.0, 1.0) else values / choice.temperature
    row = VocabRow(divided)
    if not math.isfinite(row.peak):
        return Pick(0, row.peak)
    kept = None
    if choice.temperature == 0.0:
        token_id = row.first_max()
    else:
        kept = survivors(row, choice.top_k, choice.top_p, choice.min_p)
        token_id = draw(row, kept, hashes, key)
    if choice.logprobs is None:
        return Pick(token_id, row.peak)
    if mode.startswith("processed"):
        reported = only(row, kept)
    else:
        reported = row if divided is raw else VocabRow(raw)
    normalize = mode.endswith("logprobs")
    entry = describe_token(reported, token_id, choice.logprobs, normalize=normalize)
    return Pick(token_id, row.peak, entry)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    return values[0][None] if len(values) == 1 else torch.stack(list(values))
