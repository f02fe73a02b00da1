"""Sums over a prompt's tokens, for pooling by the mean.

Tokens form spans of `SPAN` positions. A span is summed token by token, and the sums of spans are
added one after the other, both in fp32. So the order of additions is fixed by positions: the bits
depend neither on the other prompts of a step nor on where a prompt is cut into chunks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.ops.registry import op

SPAN = 32
_TOGETHER = 64
"""Spans that are laid out side by side, which bounds the memory for that."""


@op(mutates=("spans", "rest"), is_invariant=True, only_for="pooling by the mean")
def sum_chunks(x: Tensor, chunks: Tensor, spans: Tensor, rest: Tensor) -> None:
    """Add chunks of R prompts to the sums of their tokens.

    x [T, C], any float dtype. chunks [R, 3] int64: a chunk's first row of x, the position of its
    first token in the prompt, and its number of tokens, at least 1.
    spans [R, C] fp32 (fp64 for x in fp64): the sum of the prompt's whole spans before the chunk,
    then up to its end. rest [R, C], likewise: the sum of the tokens after these spans.
    """
    starts, firsts, counts = chunks.cpu().numpy().T
    num_spans = (firsts + counts - 1) // SPAN - firsts // SPAN + 1
    sums = _span_sums(x, starts, firsts, counts, num_spans, rest)
    begins = np.cumsum(num_spans) - num_spans
    is_open = (firsts + counts) % SPAN > 0
    whole = num_spans - is_open
    for number in range(int(whole.max(initial=0))):
        rows = np.flatnonzero(whole > number)
        into = _on(x, rows)
        spans[into] = spans[into] + sums[_on(x, begins[rows] + number)]
    rest.zero_()
    rows = np.flatnonzero(is_open)
    rest[_on(x, rows)] = sums[_on(x, (begins + num_spans - 1)[rows])]


def _span_sums(
    x: Tensor,
    starts: np.ndarray,
    firsts: np.ndarray,
    counts: np.ndarray,
    num_spans: np.ndarray,
    rest: Tensor,
) -> Tensor:
    """The sum of each span that the chunks touch, prompt after prompt: of all tokens of the span up
    to the chunk's end.
    """
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = within + np.repeat(firsts, counts)
    tokens = within + np.repeat(starts, counts)
    begins = np.cumsum(num_spans) - num_spans
    span_of = positions // SPAN - np.repeat(firsts // SPAN - begins, counts)
    sums = rest.new_zeros((int(num_spans.sum()), x.shape[1]))
    sums[_on(x, begins)] = rest
    offsets = positions % SPAN
    for first in range(0, len(sums), _TOGETHER):
        part = sums[first : first + _TOGETHER]
        inside = np.flatnonzero((span_of >= first) & (span_of < first + _TOGETHER))
        laid_out = part.new_zeros((SPAN, *part.shape))  # adding 0 changes no bit
        places = _on(x, offsets[inside]), _on(x, span_of[inside] - first)
        laid_out[places] = x[_on(x, tokens[inside])].to(part.dtype)
        for offset in range(offsets[inside].min(), offsets[inside].max() + 1):
            part += laid_out[offset]
    return sums


def _on(x: Tensor, places: np.ndarray) -> Tensor:
    return torch.from_numpy(places).to(x.device)
