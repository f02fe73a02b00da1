"""One vector of a prompt's hidden states, for each way of pooling: of the tokens so far, which come
in chunks. Bits depend on neither the chunks nor the other rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.models.pooling.spec import SequencePooling
from quire.ops import Ops
from quire.runner.pooling.prompt_sums import PartialSum, PromptChunk, add_chunks


@dataclass(frozen=True, slots=True)
class PoolingChunk:
    """`count` tokens from position `first` on of a prompt with `length` tokens, from row `start` of
    the hidden states. `before`: what the same pooling kept of the tokens before; None: there are
    none.
    """

    first: int
    start: int
    count: int
    length: int
    before: Any


class PooledChunks(NamedTuple):
    """The vectors [R, C] of R chunks, and what is kept of the r-th for the one after it."""

    vectors: Tensor
    keep: Callable[[int], Any]


def pooled(
    ops: Ops, pooling: SequencePooling, hidden: Tensor, chunks: Sequence[PoolingChunk]
) -> PooledChunks:
    """hidden [T, C] with the tokens of the chunks -> [R, C]. The vector of a chunk that is not its
    prompt's last one means nothing.
    """
    return _POOLINGS[pooling](ops, hidden, chunks)


def _first(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    assert all(c.before is not None or c.first == 0 for c in chunks), "a first token is missing"
    vectors = hidden[[c.start for c in chunks]]
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            vectors[row] = chunk.before
    return PooledChunks(vectors, lambda row: vectors[row].clone())


def _last(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    return PooledChunks(hidden[[c.start + c.count - 1 for c in chunks]], lambda row: None)


def _sums(ops: Ops, values: Tensor, chunks: Sequence[PoolingChunk]) -> PartialSum:
    parts = [PromptChunk(c.first, c.start, c.count, c.before) for c in chunks]
    return add_chunks(ops, values, parts)


def _mean(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    sums = _sums(ops, hidden, chunks)
    return PooledChunks(sums.total / _column(hidden, [float(c.length) for c in chunks]), sums.of)


def _mean_by_root(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    sums = _sums(ops, hidden, chunks)
    return PooledChunks(sums.total / _column(hidden, [c.length**0.5 for c in chunks]), sums.of)


def _weighted_mean(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    """Token i of n counts i times, from 1 on (SGPT, Muennighoff 2022)."""
    weights = torch.zeros(len(hidden), 1)
    for c in chunks:
        places = torch.arange(c.first + 1, c.first + c.count + 1, dtype=torch.float32)
        weights[c.start : c.start + c.count, 0] = places
    sums = _sums(ops, hidden.float() * weights.to(hidden.device), chunks)
    totals = _column(hidden, [c.length * (c.length + 1) / 2 for c in chunks])
    return PooledChunks(sums.total / totals, sums.of)


def _largest(ops: Ops, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    vectors = torch.stack([hidden[c.start : c.start + c.count].amax(0) for c in chunks])
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            vectors[row] = torch.maximum(vectors[row], chunk.before)
    return PooledChunks(vectors, lambda row: vectors[row].clone())


def _column(hidden: Tensor, numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(hidden.device)[:, None]


_Pooling = Callable[[Ops, Tensor, Sequence[PoolingChunk]], PooledChunks]
_POOLINGS: Mapping[SequencePooling, _Pooling] = MappingProxyType(
    {
        "cls": _first,
        "last": _last,
        "mean": _mean,
        "mean_sqrt": _mean_by_root,
        "weightedmean": _weighted_mean,
        "max": _largest,
    }
)
