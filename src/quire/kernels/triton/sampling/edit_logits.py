"""Biases, penalties and forbidden words: see `quire.ops.sampling.edits`.

A lane has one entry, one token of the history or one word. What order the lanes come in decides
nothing: entries of one logit are apart or write the same, and counts are whole numbers.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import dense, kernel

_LANES = 256
_SEEN = tl.constexpr(1 << 30)
"""The bit of a count that says that the token occurs; below it is how often in the output."""


@kernel
def _bias_kernel(
    logits: tl.tensor,
    places: tl.tensor,
    entries: tl.tensor,
    values: tl.tensor,
    num_entries: int,
    stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = entry < num_entries
    which = tl.load(entries + entry * 2, inside, other=0)
    id = tl.load(entries + entry * 2 + 1, inside, other=-1)
    is_token = (id >= 0) & (id < V)
    at = tl.load(places + which * 4, inside, other=0) * stride + id
    value = tl.load(values + entry, inside, other=0.0)
    # who forbids reads nothing, since another lane may be forbidding the same token
    old = tl.load(logits + at, is_token & (value != float("-inf")), other=0.0)
    tl.store(logits + at, tl.where(value == float("-inf"), value, old + value), is_token)


@kernel
def _clear_kernel(
    history: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    history_stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Chunk program_id(1) of the ids of place program_id(0) have been seen 0 times."""
    id, is_token, _ = _tokens(history, places, history_stride, V, LANES)
    tl.store(counts + tl.program_id(0).to(tl.int64) * V + id, 0, is_token)


@kernel
def _count_kernel(
    history: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    history_stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """... and are seen."""
    id, is_token, is_output = _tokens(history, places, history_stride, V, LANES)
    to = counts + tl.program_id(0).to(tl.int64) * V + id
    tl.atomic_or(to, tl.full((LANES,), _SEEN, tl.int32), is_token)
    tl.atomic_add(to, tl.full((LANES,), 1, tl.int32), is_token & is_output)


@kernel
def _penalize_kernel(
    logits: tl.tensor,
    history: tl.tensor,
    places: tl.tensor,
    penalties: tl.tensor,
    counts: tl.tensor,
    stride: int,
    history_stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Edits each token once: among lanes that have the same one, the first to take its count does
    the work.
    """
    place = tl.program_id(0).to(tl.int64)
    id, is_token, _ = _tokens(history, places, history_stride, V, LANES)
    count = tl.atomic_xchg(counts + place * V + id, tl.zeros((LANES,), tl.int32), is_token)
    is_mine = is_token & (count != 0)
    count &= _SEEN - 1
    repetition = tl.load(penalties + place * 3)
    frequency = tl.load(penalties + place * 3 + 1)
    presence = tl.load(penalties + place * 3 + 2)
    at = logits + tl.load(places + place * 4) * stride + id
    x = tl.load(at, is_mine, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    lowered = x - count.to(tl.float32) * frequency - presence
    tl.store(at, tl.where(count > 0, lowered, x), is_mine)


@kernel
def _tokens(
    history: tl.tensor,
    places: tl.tensor,
    history_stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> Any:
    """A program's ids, which of them are tokens, and which of the output."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row = tl.load(places + place * 4 + 1)
    inside = at < tl.load(places + place * 4 + 3)
    id = tl.load(history + row * history_stride + at, inside, other=-1)
    return id, (id >= 0) & (id < V), at >= tl.load(places + place * 4 + 2)


@kernel
def _words_kernel(
    logits: tl.tensor,
    history: tl.tensor,
    places: tl.tensor,
    words: tl.tensor,
    num_words: int,
    length: int,
    stride: int,
    history_stride: int,
    V: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """A lane has a word of `length` tokens before the last."""
    word = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = word < num_words
    of_word = words + word.to(tl.int64) * (length + 2)
    place = places + tl.load(of_word, inside, other=0).to(tl.int64) * 4
    row = tl.load(place + 1, inside, other=0)
    border = tl.load(place + 2, inside, other=0)
    position = tl.load(place + 3, inside, other=0)
    id = tl.load(of_word + length + 1, inside, other=-1)
    is_ending = (id >= 0) & (id < V)
    for back in range(1, length + 1):
        asked = tl.load(of_word + length + 1 - back, inside, other=-1)
        at = position - back
        is_output = inside & (at >= border)
        token = tl.load(history + row * history_stride + at, is_output, other=-1)
        is_ending = is_ending & ((asked == -1) | (is_output & (token == asked)))
    at = tl.load(place, inside, other=0) * stride + id
    tl.store(logits + at, float("-inf"), is_ending)


def bias_logits(logits: Tensor, places: Tensor, entries: Tensor, values: Tensor) -> None:
    """See `quire.ops.sampling.edits.bias_logits`."""
    count = len(entries)
    if count:
        _bias_kernel[(_programs(count),)](
            logits,
            dense(places),
            dense(entries),
            dense(values),
            count,
            _stride(logits),
            V=logits.shape[1],
            LANES=_LANES,
        )


def penalize(logits: Tensor, history: Tensor, places: Tensor, penalties: Tensor) -> None:
    """See `quire.ops.sampling.edits.penalize`. Memory for counts: as much as the logits of the
    places.
    """
    if not len(places):
        return
    width = logits.shape[1]
    places, penalties = dense(places), dense(penalties)
    counts = logits.new_empty(len(places), width, dtype=torch.int32)
    strides, sizes = (_stride(logits), _stride(history)), {"V": width, "LANES": _LANES}
    grid = (len(places), _programs(history.shape[1]))
    # not all of the memory: counts of ids outside of the histories are never read
    _clear_kernel[grid](history, places, counts, strides[1], **sizes)
    _count_kernel[grid](history, places, counts, strides[1], **sizes)
    # a product and a difference are rounded one after the other, as everywhere
    _penalize_kernel[grid](
        logits, history, places, penalties, counts, *strides, **sizes, enable_fp_fusion=False
    )


def forbid_words(logits: Tensor, history: Tensor, places: Tensor, words: Tensor) -> None:
    """See `quire.ops.sampling.edits.forbid_words`."""
    count, columns = words.shape
    if count:
        _words_kernel[(_programs(count),)](
            logits,
            history,
            dense(places),
            dense(words),
            count,
            columns - 2,
            _stride(logits),
            _stride(history),
            V=logits.shape[1],
            LANES=_LANES,
        )


def _programs(count: int) -> int:
    return -(-count // _LANES)


def _stride(rows: Tensor) -> int:
    assert rows.stride(1) == 1
    return rows.stride(0)
