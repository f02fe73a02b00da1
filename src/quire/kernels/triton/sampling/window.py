"""The window of entries of a row on which a cut may fall, known from a sample of it.

Most entries surely stay and most surely fall. Some thousand, evenly spread over the row, say
between which two keys the cut lies, but for four deviations of what a sample can be wrong. What
lies between are the open entries. They are collected while the row is read anyway, and cut exactly.
Only then is it known whether the sample was right: where it was not, and where there are more open
entries than room, the cut is searched in the whole row (`cuts`).

Room is taken by an atomic counter, so open entries come in any order. Nothing depends on it: what
is summed over them are whole numbers.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import kernel, power_of_2
from quire.kernels.triton.sampling.cuts import number, ordered

_SAMPLE = 4096
_ROOM = 8192
_FEW = 2048
_DEVIATIONS = tl.constexpr(4.0)
_NO_KEY = tl.constexpr(0xFFFFFFFF)
"""A key above those of all numbers."""
_FINEST = tl.constexpr(1 << 12)
"""Precision with which keys of a window are sought."""
_ID_BITS = tl.constexpr(20)
MAX_WIDTH = 1 << 20
"""Largest width of a row, so that a key and an id are one number."""
_UNIT = tl.constexpr(1 << 40)
"""Weight of the largest entry, where weights are whole numbers."""


@kernel
def sample_of_row(
    row: tl.tensor, temperature: tl.tensor, V: tl.constexpr, SAMPLE: tl.constexpr
) -> Any:
    """Entries of the row divided by the temperature, -inf beyond the last entry."""
    lane = tl.arange(0, SAMPLE)
    if V > SAMPLE:
        x = tl.load(row + (lane.to(tl.int64) * V) // SAMPLE)
    else:  # a second path for the compiler, not for Python
        x = tl.load(row + lane, lane < V, other=float("-inf"))
    return tl.div_rn(x, temperature)


@kernel
def window_of_k(sample: tl.tensor, top_k: tl.tensor, V: tl.constexpr, SAMPLE: tl.constexpr) -> Any:
    """Keys low and high: the k-th largest entry has a key from low on and below high."""
    entries_of_lane: tl.constexpr = V / SAMPLE if V > SAMPLE else 1.0
    expected = (top_k / entries_of_lane).to(tl.float32)
    error = _DEVIATIONS * tl.sqrt(expected + 1.0)
    above = tl.floor(expected - error).to(tl.int32)
    enough = tl.ceil(expected + error).to(tl.int32) + 4
    key = ordered(sample)
    low, high = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)
    step = tl.full((), 1 << 31, tl.uint32)
    while step >= _FINEST:
        low = tl.where(tl.sum((key >= low + step).to(tl.int32), 0) >= enough, low + step, low)
        high = tl.where(tl.sum((key >= high + step).to(tl.int32), 0) >= above, high + step, high)
        step = step >> 1
    return low, _beyond(tl.where(above > 0, high, _NO_KEY).to(tl.uint32))


@kernel
def window_of_p(
    sample: tl.tensor,
    peak: tl.tensor,
    whole: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> Any:
    """Keys low and high: the entry with which the largest reach top_p of `whole` lies between.

    Sums over a tail have small errors, because no entry in it is large.
    """
    entries_of_lane: tl.constexpr = V / SAMPLE if V > SAMPLE else 1.0
    dropped = ((1.0 - top_p) * whole / entries_of_lane).to(tl.float32)
    key, weight = ordered(sample), tl.exp(sample - peak)
    low, high = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)
    step = tl.full((), 1 << 31, tl.uint32)
    while step >= _FINEST:
        tail, error = _tail(key, weight, low + step)
        low = tl.where(tail + error < dropped, low + step, low)
        tail, error = _tail(key, weight, high + step)
        high = tl.where(tail - error <= dropped, high + step, high)
        step = step >> 1
    return low, _beyond(high)


@kernel
def _tail(key: tl.tensor, weight: tl.tensor, edge: tl.tensor) -> Any:
    """Weight of the sample below the edge, and the error that it can have."""
    below = tl.where(key < edge, weight, 0.0)
    return tl.sum(below, 0), _DEVIATIONS * tl.sqrt(tl.sum(below * below, 0))


@kernel
def _beyond(key: tl.tensor) -> Any:
    """The next key that a search with steps of `_FINEST` at least can tell from this one."""
    return tl.where(key >= _NO_KEY - _FINEST, _NO_KEY, key + _FINEST).to(tl.uint32)


@kernel
def collect(
    key: tl.tensor,
    id: tl.tensor,
    is_open: tl.tensor,
    count: tl.tensor,
    entries: tl.tensor,
    ROOM: tl.constexpr,
) -> None:
    """Append the open ones to the row's `entries` [ROOM] int64, as far as there is room, and add
    how many they are to `count`.
    """
    is_taken = is_open.to(tl.int32)
    num_open = tl.sum(is_taken, 0)
    if num_open > 0:
        place = tl.atomic_add(count, num_open, sem="relaxed") + tl.cumsum(is_taken, 0) - 1
        # ids upside down: of equal keys the lowest id has the largest number
        entry = (key.to(tl.int64) << _ID_BITS) + (id ^ 0xFFFFF)
        tl.store(entries + place, entry, is_open & (place < ROOM))


@kernel
def key_of(entry: tl.tensor) -> Any:
    """The key of a collected entry."""
    return (entry >> _ID_BITS).to(tl.uint32)


@kernel
def id_of(entry: tl.tensor) -> Any:
    """The id of a collected entry."""
    return (entry & 0xFFFFF).to(tl.int32) ^ 0xFFFFF


@kernel
def _last_reaching(
    entry: tl.tensor, unit: tl.tensor, needed: tl.tensor, low: tl.tensor, high: tl.tensor
) -> Any:
    """The largest number from which on units [SIZE] sum to `needed` at least; that of key `low` if
    no number is. Entries are ordered by key and, downwards, by id; all keys are below `high`.
    """
    found = low.to(tl.int64) << _ID_BITS
    span = (high - low).to(tl.int64) << _ID_BITS
    step = tl.full((), 1, tl.int64)
    while step < span:
        step = step * 2
    while step > 0:
        total = tl.sum(tl.where(entry >= found + step, unit, 0), 0)
        found = tl.where(total >= needed, found + step, found)
        step = step // 2
    return found


@kernel
def settle(
    entry: tl.tensor,
    count: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    sure_count: tl.tensor,
    sure_weight: tl.tensor,
    peak: tl.tensor,
    whole: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    SIZE: tl.constexpr,
) -> Any:
    """The least of the open entries [SIZE] that top-k and top-p leave, and whether that is so: not
    if the cut is elsewhere.

    low, high: between which keys entries are open; `floor`: below which min-p drops them.
    sure_count, sure_weight: of the entries above them. whole: what top_p is a share of where there
    is not a top-k.
    """
    is_open = tl.arange(0, SIZE) < count
    least = low.to(tl.int64) << _ID_BITS
    is_whole = low <= floor  # nothing below the open ones could stay
    is_right = count >= 0
    weight = tl.exp(number(key_of(entry)) - peak).to(tl.float64) * _UNIT
    # whole numbers: entries are collected in any order, on which a sum of floats would depend
    unit = tl.where(is_open, weight.to(tl.int64), 0)
    whole = (whole.to(tl.float64) * _UNIT).to(tl.int64)
    has_k = (top_k > 0.0) & (top_k < V)
    if has_k:
        needed = top_k.to(tl.int64) - sure_count
        is_right = (needed > 0) & ((needed <= count) | is_whole)
        nth = _last_reaching(entry, is_open.to(tl.int64), needed, low, high)
        none = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        nth = tl.min(tl.where(is_open & (entry >= nth), entry, none), 0)
        least = tl.maximum(least, (nth >> _ID_BITS) << _ID_BITS)  # what is equal to it stays
        unit = tl.where(entry >= least, unit, 0)
        whole = tl.sum(unit, 0)
    if top_p < 1.0:
        target = tl.maximum((top_p * whole.to(tl.float64)).to(tl.int64), 1)
        needed = target - (sure_weight * _UNIT).to(tl.int64)
        is_reached = (tl.sum(unit, 0) >= needed) | is_whole | has_k
        is_right = is_right & (needed > 0) & is_reached
        least = tl.maximum(least, _last_reaching(entry, unit, needed, low, high))
    return least, is_right


def sample_of(width: int) -> int:
    """The number of entries of a row that are looked at first."""
    return min(_SAMPLE, power_of_2(width))


def room_of(width: int) -> int:
    """The most open entries that a row may have."""
    return min(_ROOM, power_of_2(width))


def few_of(width: int) -> int:
    """The number of entries settled together where they are few, which is the common case."""
    return min(_FEW, power_of_2(width))


def open_entries(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Counts of open entries of logits [R, V]: [R] int32, and memory for them [R, room] int64."""
    rows, width = logits.shape
    counts = logits.new_empty(rows, dtype=torch.int32)
    return counts, logits.new_empty(rows, room_of(width), dtype=torch.int64)
