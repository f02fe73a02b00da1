"""One vector of a prompt's hidden states, for each way of pooling: of the tokens so far, which come
in chunks. Bits depend on neither the chunks nor the other rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.models.pooling.spec import SequencePooling
from quire.ops import Ops
from quire.runner.devices.device import Send
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
    ops: Ops,
    send: Send,
    pooling: SequencePooling,
    hidden: Tensor,
    chunks: Sequence[PoolingChunk],
) -> PooledChunks:
    """hidden [T, C] with the tokens of the chunks -> [R, C]. The vector of a chunk that is not its
    prompt's last one means nothing.
    """
    return _POOLINGS[pooling](ops, send, hidden, chunks)


def _first(ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    assert all(c.before is not None or c.first == 0 for c in chunks), "a first token is missing"
    vectors = hidden[send(np.array([c.start for c in chunks], dtype=np.int64))]
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            vectors[row] = chunk.before
    return PooledChunks(vectors, lambda row: vectors[row].clone())


def _last(ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    places = np.array([c.start + c.count - 1 for c in chunks], dtype=np.int64)
    return PooledChunks(hidden[send(places)], lambda row: None)


def _sums(ops: Ops, send: Send, values: Tensor, chunks: Sequence[PoolingChunk]) -> PartialSum:
    parts = [PromptChunk(c.first, c.start, c.count, c.before) for c in chunks]
    return add_chunks(ops, send, values, parts)


def _mean(ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    sums = _sums(ops, send, hidden, chunks)
    return PooledChunks(sums.total / _column(send, [c.length for c in chunks]), sums.of)


def _mean_by_root(
    ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]
) -> PooledChunks:
    sums = _sums(ops, send, hidden, chunks)
    return PooledChunks(sums.total / _column(send, [c.length**0.5 for c in chunks]), sums.of)


def _weighted_mean(
    ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]
) -> PooledChunks:
    """Token i of n counts i times, from 1 on (SGPT, Muennighoff 2022)."""
    weights = np.zeros((len(hidden), 1), dtype=np.float32)
    for c in chunks:
        weights[c.start : c.start + c.count, 0] = np.arange(c.first + 1, c.first + c.count + 1)
    sums = _sums(ops, send, hidden.float() * send(weights), chunks)
    totals = _column(send, [c.length * (c.length + 1) / 2 for c in chunks])
    return PooledChunks(sums.total / totals, sums.of)


def _largest(ops: Ops, send: Send, hidden: Tensor, chunks: Sequence[PoolingChunk]) -> PooledChunks:
    vectors = torch.stack([hidden[c.start : c.start + c.count].amax(0) for c in chunks])
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            vectors[row] = torch.maximum(vectors[row], chunk.before)
    return PooledChunks(vectors, lambda row: vectors[row].clone())


def _column(send: Send, numbers: Sequence[float]) -> Tensor:
    return send(np.array(numbers, dtype=np.float32)[:, None])


_Pooling = Callable[[Ops, Send, Tensor, Sequence[PoolingChunk]], PooledChunks]
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
