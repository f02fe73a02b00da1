"""Sums over a prompt's tokens whose bits depend on neither the other rows of a step nor on where
the prompt is cut into chunks.

Tokens form spans of `SPAN` positions. A span is summed token by token, and the sums of spans are
added one after the other, both in fp32. So the order of additions is fixed by positions, while
those of different spans and rows are independent and happen together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPAN = 32


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum [C] of the whole spans up to some token, and that of the tokens after them."""

    spans: Tensor
    rest: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all tokens, where they end in the middle of a span or not."""
        return self.spans + self.rest


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`count` tokens of a prompt from position `first` on; their values begin at row `start`."""

    first: int
    start: int
    count: int
    before: PartialSum | None
    """The sum of the tokens before `first`; None where there are none."""


def add_pieces(values: Tensor, pieces: Sequence[PromptChunk]) -> list[PartialSum]:
    """values [T, C] of any float dtype -> the sum of each prompt up to the end of its piece."""
    spans = _spans(values, pieces)
    sums, at = [], 0
    for piece in pieces:
        count = _num_spans(piece)
        own, at = spans[at : at + count], at + count
        total = torch.zeros_like(own[0]) if piece.before is None else piece.before.spans
        ends_span = (piece.first + piece.count) % SPAN == 0
        for span in own if ends_span else own[:-1]:
            total = total + span
        rest = torch.zeros_like(total) if ends_span else own[-1]
        sums.append(PartialSum(total, rest))
    return sums


def _num_spans(piece: PromptChunk) -> int:
    return (piece.first + piece.count - 1) // SPAN - piece.first // SPAN + 1


def _spans(values: Tensor, pieces: Sequence[PromptChunk]) -> Tensor:
    """The sum of each span that the pieces touch, one after the other, with what came before."""
    counts = np.array([piece.count for piece in pieces])
    firsts = np.array([piece.first for piece in pieces])
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    positions = within + np.repeat(firsts, counts)
    tokens = within + np.repeat([piece.start for piece in pieces], counts)
    num_spans = np.array([_num_spans(piece) for piece in pieces])
    first_spans = np.cumsum(num_spans) - num_spans
    span_of = positions // SPAN - np.repeat(firsts // SPAN - first_spans, counts)
    total = torch.zeros((int(num_spans.sum()), values.shape[1]), device=values.device)
    for piece, at in zip(pieces, first_spans.tolist(), strict=True):
        if piece.before is not None:
            total[at] = piece.before.rest
    offsets = positions % SPAN
    for offset in np.unique(offsets):
        chosen = np.flatnonzero(offsets == offset)
        into = torch.from_numpy(span_of[chosen]).to(values.device)
        rows = torch.from_numpy(tokens[chosen]).to(values.device)
        total[into] = total[into] + values[rows].float()
    return total
