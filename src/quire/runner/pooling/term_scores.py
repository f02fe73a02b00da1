"""Language-model heads for prompts whose vectors are weights of the vocabulary's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.models.pooling.pooler import Pooler
from quire.models.pooling.spec import TermWeights
from quire.runner.devices.device import Send
from quire.runner.pooling.prompt_sums import PartialSum, PromptChunk, add_chunks

_MOST_SCORES = 2**22
"""Scores that are computed at once, which bounds the memory for them."""


def term_scores(pooler: Pooler, send: Send, hidden: Tensor, places: Sequence[range]) -> Tensor:
    """hidden [T, C], with the tokens of M prompts in these rows -> fp32 [M, V]: the largest score
    of each token of the vocabulary, of which finish.py makes weights, or the sum of its weights.
    """
    terms = pooler.spec.terms
    assert terms is not None, "a model whose vectors are sparse"
    largest = hidden.new_full((len(places), terms.size), -torch.inf, dtype=torch.float32)
    sums: dict[int, PartialSum] = {}
    rows = np.concatenate([np.asarray(place, dtype=np.int64) for place in places])
    ends = np.cumsum([len(place) for place in places])
    at_once = max(1, _MOST_SCORES // terms.size)
    for first in range(0, len(rows), at_once):
        chosen = send(rows[first : first + at_once])
        scores = pooler.classify(hidden[chosen]).float()
        chunks = _chunks(places, ends, first, first + len(chosen), sums)
        if terms.pooling == "sum":
            found = add_chunks(pooler.ops, send, _weights(scores, terms), [*chunks.values()])
            sums |= {prompt: found.of(i) for i, prompt in enumerate(chunks)}
            continue
        for prompt, chunk in chunks.items():
            best = scores[chunk.start : chunk.start + chunk.count].amax(0)
            largest[prompt] = torch.maximum(largest[prompt], best)
    if terms.pooling == "max":
        return largest
    nothing = torch.zeros_like(largest[0])
    return torch.stack([sums[i].total if i in sums else nothing for i in range(len(places))])


def _chunks(
    places: Sequence[range], ends: np.ndarray, first: int, end: int, sums: dict[int, PartialSum]
) -> dict[int, PromptChunk]:
    """The part of each prompt in the rows from `first` to `end` of all prompts' rows."""
    found = {}
    for prompt, (place, last) in enumerate(zip(places, ends.tolist(), strict=True)):
        begin = last - len(place)
        start, stop = max(begin, first), min(last, end)
        if start < stop:
            before = sums.get(prompt)
            found[prompt] = PromptChunk(start - begin, start - first, stop - start, before)
    return found


def _weights(scores: Tensor, terms: TermWeights) -> Tensor:
    """log(1 + relu(scores)), computed in fp64 so that the rounded bits are the same in any place
    of a tensor.
    """
    weights = scores.double().relu_().log1p_()
    return (weights.log1p_() if terms.is_damped else weights).float()
