"""Rows of logits in pieces: chunks, one for each program, or blocks, one after the other."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import kernel, power_of_2

_CHUNK = 4096
"""Entries of a program where many programs share a row."""

_BLOCK = 2048
"""Entries at a time where a program has the whole row: 16 sums of each lane are in registers."""


@kernel
def largest(score: tl.tensor, at: tl.tensor, V: tl.constexpr) -> Any:
    """The largest score and the lowest id that has it; the score is NaN where there is a NaN."""
    best = tl.max(tl.where(score == score, score, float("-inf")), 0)
    index = tl.min(tl.where(score == best, at, V), 0)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    return tl.where(has_nan, float("nan"), best), index


@kernel
def is_finite(x: tl.tensor) -> Any:
    """Neither NaN nor an infinity."""
    return (x == x) & (tl.abs(x) != float("inf"))


def chunks_of(width: int) -> tuple[int, int]:
    """The number of chunks of a row, and of entries in each."""
    chunk = min(_CHUNK, power_of_2(width))
    return -(-width // chunk), chunk


def of_chunks(logits: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Room for a float and an integer of each chunk, [R, chunks]."""
    shape = (logits.shape[0], chunks)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def warps_of(chunk: int) -> int:
    """The number of warps of a program with `chunk` entries."""
    return min(8, max(1, chunk // 512))


def one_program(width: int) -> dict[str, int]:
    """Block and warps of a program that has a whole row."""
    block = min(_BLOCK, power_of_2(width))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 128))}
