"""The sums of prompts' tokens, chunk after chunk. The order of additions: ops/mixers/pooling.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.ops import Ops
from quire.runner.devices.device import Send


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum of the whole spans up to some token, and that of the tokens after them: [C] fp32, or
    [R, C] of several prompts.
    """

    spans: Tensor
    rest: Tensor

    @property
    def total(self) -> Tensor:
        return self.spans + self.rest

    def of(self, prompt: int) -> PartialSum:
        """The sum of one of several prompts, in memory of its own."""
        return PartialSum(self.spans[prompt].clone(), self.rest[prompt].clone())


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`count` tokens of a prompt from position `first` on; their values begin at row `start`."""

    first: int
    start: int
    count: int
    before: PartialSum | None
    """The sum of the tokens before `first`; None where there are none."""


def add_chunks(ops: Ops, send: Send, values: Tensor, chunks: Sequence[PromptChunk]) -> PartialSum:
    """values [T, C] of any float dtype -> the sums [R, C] of R prompts up to the end of their
    chunks.
    """
    shape = (2, len(chunks), values.shape[1])
    spans, rest = torch.zeros(shape, device=values.device)
    for row, chunk in enumerate(chunks):
        if chunk.before is not None:
            spans[row], rest[row] = chunk.before.spans, chunk.before.rest
    places = np.array([(c.start, c.first, c.count) for c in chunks], dtype=np.int64)
    ops.sum_chunks(values, send(places), spans, rest)
    return PartialSum(spans, rest)
