"""`logprobs` and `logprob_token_ids`: the columns of a sampled token, and their contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.devices.device import Send
from quire.runner.sampling.columns import SampledLogprobs, empty_columns

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The columns after the token's own: the `num_top` likeliest, or exactly `ids`,
    int64: [n] for all entries, or [M, n].
    """

    num_top: int
    ids: Tensor | None = None

    @staticmethod
    def of(params: SamplingParams, vocab_size: int, send: Send) -> LogprobRequest | None:
        """Return what `params` request; None for nothing."""
        if params.logprob_token_ids is not None:
            ids = np.array(params.logprob_token_ids, dtype=np.int64)
            return LogprobRequest(0, send(ids))
        if params.logprobs is None:
            return None
        return LogprobRequest(vocab_size if params.logprobs == -1 else params.logprobs)

    @property
    def num_columns(self) -> int:
        """The number of columns, including the token's own."""
        return 1 + (self.num_top if self.ids is None else self.ids.shape[-1])


@dataclass(frozen=True, slots=True)
class Described:
    """Consecutive rows of logits [n, V] with equal requests, and the place of the first among the
    entries.
    """

    first: int
    logits: Tensor
    request: LogprobRequest


def describe(
    ops: Ops,
    pieces: Sequence[Described],
    index: list[int],
    token_ids: Tensor,
    *,
    normalize: bool,
) -> SampledLogprobs:
    """Compute the columns of tokens [M] in rows of logits: log-softmax values, or the logits
    themselves. `index` [M] numbers the entries; the pieces hold their rows in order. M > 0. One
    pass over each row, the rest as `ops.rank`.
    """
    counts = [piece.request.num_columns for piece in pieces for _ in range(len(piece.logits))]
    columns = empty_columns(index, counts, token_ids.device)
    for piece in pieces:
        rows = slice(piece.first, piece.first + len(piece.logits))
        own = token_ids[rows]
        found = ops.rank(piece.logits, own, piece.request.num_top)
        others = found.top_ids.long() if piece.request.ids is None else piece.request.ids
        ids = torch.cat([own[:, None], others.expand(len(own), -1)], dim=1)
        values = piece.logits.gather(1, ids)
        if normalize:
            values = values.sub_(found.peaks[:, None]).sub_(found.log_sums[:, None])
        width = ids.shape[1]
        columns.token_ids[rows, :width] = ids.int()
        columns.values[rows, :width] = values
        columns.ranks[rows] = found.ranks
    return columns


def describe_sampled(
    ops: Ops,
    mode: LogprobsMode,
    asked: Sequence[tuple[int, LogprobRequest]],
    logits: Tensor,
    raw: Mapping[int, Tensor],
    settings: Tensor,
    token_ids: Tensor,
) -> SampledLogprobs:
    """Compute the columns of the tokens [M] drawn in the rows `asked`, ascending and not empty, of
    edited logits [R, V].

    `raw` has rows as they were before edits, where the mode reports those; `settings` [M, 4] are
    the draws', for the other modes.
    """
    index = [row for row, _ in asked]
    if raw:
        logits = torch.stack([raw.get(row, logits[row]) for row in index])
        asked = [(m, request) for m, (_, request) in enumerate(asked)]
    pieces = list(runs(logits, asked))
    if not mode.startswith("raw"):
        pieces = [
            replace(p, logits=ops.truncate(p.logits, settings[p.first : p.first + len(p.logits)]))
            for p in pieces
        ]
    return describe(ops, pieces, index, token_ids, normalize=mode.endswith("logprobs"))


def runs(logits: Tensor, wanted: Sequence[tuple[int, LogprobRequest]]) -> Iterator[Described]:
    """Yield pieces of neighbouring rows with equal requests; wanted: (row of logits, request)
    ascending.

    A piece is a view of `logits` [R, V].
    """
    start = 0
    for end in range(1, len(wanted) + 1):
        if end < len(wanted) and _belong_together(wanted[end - 1], wanted[end]):
            continue
        first, request = wanted[start]
        yield Described(start, logits[first : first + end - start], request)
        start = end


def _belong_together(a: tuple[int, LogprobRequest], b: tuple[int, LogprobRequest]) -> bool:
    """Whether the rows are neighbours and request the same number of likeliest tokens."""
    return b[0] == a[0] + 1 and a[1].ids is b[1].ids is None and a[1].num_top == b[1].num_top
