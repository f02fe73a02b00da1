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
_TOGETHER = 64
"""Spans that are laid out side by side, which bounds the memory for that."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum of the whole spans up to some token, and that of the tokens after them: [C], or [R,
    C] of several prompts.
    """

    spans: Tensor
    rest: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all tokens."""
        return self.spans + self.rest

    def of(self, prompt: int) -> PartialSum:
        """That of one of several prompts, in memory of its own."""
        return PartialSum(self.spans[prompt].clone(), self.rest[prompt].clone())


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`count` tokens of a prompt from position `first` on; their values begin at row `start`."""

    first: int
    start: int
    count: int
    before: PartialSum | None
    """The sum of the tokens before `first`; None where there are none."""


def add_chunks(values: Tensor, chunks: Sequence[PromptChunk]) -> PartialSum:
    """values [T, C] of any float dtype -> the sums [R, C] of R prompts up to the end of their
    chunks.
    """
    spans = _spans(values, chunks)
    counts = np.array([_num_spans(chunk) for chunk in chunks])
    begins = np.cumsum(counts) - counts
    ends_open = np.array([(chunk.first + chunk.count) % SPAN > 0 for chunk in chunks])
    total = spans.new_zeros((len(chunks), spans.shape[1]))
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            total[row] = chunk.before.spans
    whole = counts - ends_open
    for number in range(int(whole.max())):
        rows = np.flatnonzero(whole > number)
        into = _on(spans, rows)
        total[into] = total[into] + spans[_on(spans, begins[rows] + number)]
    rest = torch.zeros_like(total)
    rows = np.flatnonzero(ends_open)
    rest[_on(spans, rows)] = spans[_on(spans, (begins + counts - 1)[rows])]
    return PartialSum(total, rest)


def _on(values: Tensor, places: np.ndarray) -> Tensor:
    return torch.from_numpy(places).to(values.device)


def _num_spans(chunk: PromptChunk) -> int:
    return (chunk.first + chunk.count - 1) // SPAN - chunk.first // SPAN + 1


def _spans(values: Tensor, chunks: Sequence[PromptChunk]) -> Tensor:
    """The sum of each span that the chunks touch, one after the other, with what came before."""
    counts = np.array([chunk.count for chunk in chunks])
    firsts = np.array([chunk.first for chunk in chunks])
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    positions = within + np.repeat(firsts, counts)
    tokens = within + np.repeat([chunk.start for chunk in chunks], counts)
    num_spans = np.array([_num_spans(chunk) for chunk in chunks])
    first_spans = np.cumsum(num_spans) - num_spans
    span_of = positions // SPAN - np.repeat(firsts // SPAN - first_spans, counts)
    total = torch.zeros((int(num_spans.sum()), values.shape[1]), device=values.device)
    for chunk, at in zip(chunks, first_spans.tolist(), strict=True):
        if chunk.before is not None:
            total[at] = chunk.before.rest
    offsets = positions % SPAN
    for first in range(0, len(total), _TOGETHER):
        part = total[first : first + _TOGETHER]
        inside = np.flatnonzero((span_of >= first) & (span_of < first + _TOGETHER))
        laid_out = part.new_zeros((SPAN, *part.shape))  # adding 0 changes no bit
        places = _on(values, offsets[inside]), _on(values, span_of[inside] - first)
        laid_out[places] = values[_on(values, tokens[inside])].float()
        for offset in range(offsets[inside].min(), offsets[inside].max() + 1):
            part += laid_out[offset]
    return total
