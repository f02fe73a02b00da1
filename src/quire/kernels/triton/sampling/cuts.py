"""Cuts of min-p, top-k and top-p in a row of logits, found without sorting it, whatever is in it.

Floats become whole numbers of the same order, and a cut is found digit by digit: up to eight passes
over the row, each of which sums what lies at or above sixteen edges. One program has one row and
adds in a fixed order, so that a row's cut depends on nothing but the row. That takes about a
millisecond, so it is for the rows that `window` leaves over.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import triton.language as tl

from quire.kernels.triton.launch import kernel


@kernel
def ordered(x: tl.tensor) -> Any:
    """float32 -> uint32 of the same order; both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@kernel
def number(key: tl.tensor) -> Any:
    """The float32 that `ordered` gives this key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@kernel
def is_kept(key: tl.tensor, at: tl.tensor, low: tl.tensor, last: tl.tensor) -> Any:
    """Whether entries at `at` stay: all above key `low`, and those on it up to the id `last`."""
    return (key > low) | ((key == low) & (at <= last))


@kernel
def block_of(
    row: tl.tensor,
    start: tl.tensor,
    temperature: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Ids of a block of the row, its divided entries (-inf beyond the end), their keys."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row + at, at < V, other=float("-inf"))
    # rounded to nearest in all kernels: an entry has one key, by which it stays or is dropped
    x = tl.div_rn(x, temperature)
    return at, x, ordered(x)


@kernel
def sums_from(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    edges: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
) -> Any:
    """Entries with keys at or above each of 16 edges and `low`: how many there are, or (WEIGHED)
    the sum of exp(entry - peak), float32.
    """
    sums = tl.zeros((BLOCK, 16), tl.float32)  # one per lane: threads meet once, at the end
    for start in range(0, V, BLOCK):
        at, x, key = block_of(row, start, temperature, V, BLOCK)
        unit = tl.exp(x - peak) if WEIGHED else tl.full((BLOCK,), 1.0, tl.float32)
        unit = tl.where((at < V) & (key >= low), unit, 0.0)
        sums += tl.where(key[:, None] >= edges[None, :], unit[:, None], 0.0)
    return tl.sum(sums, 0)


@kernel
def sum_from(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
) -> Any:
    """`sums_from` of `low` itself."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at, x, key = block_of(row, start, temperature, V, BLOCK)
        unit = tl.exp(x - peak) if WEIGHED else tl.full((BLOCK,), 1.0, tl.float32)
        sums += tl.where((at < V) & (key >= low), unit, 0.0)
    return tl.sum(sums, 0)


@kernel
def largest_reaching(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
) -> Any:
    """The largest key from which on `sum_from` is at least `target` (float64), or, found earlier,
    one from which on it is exactly that: the same entries lie above it.
    """
    found = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 16)
    shift = tl.full((), 32, tl.uint32)
    is_open = tl.full((), 1, tl.int32)
    while (shift > 0) & (is_open > 0):
        shift = shift - 4
        edges = found + (digit.to(tl.uint32) << shift)
        sums = sums_from(row, temperature, peak, low, edges, V, BLOCK, WEIGHED).to(tl.float64)
        best = tl.max(tl.where(sums >= target, digit, 0), 0)
        found += best.to(tl.uint32) << shift
        is_open = tl.min((sums != target).to(tl.int32), 0)
    return found


@kernel
def nth_on(
    row: tl.tensor,
    temperature: tl.tensor,
    low: tl.tensor,
    n: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """The id of the n-th entry (from 1) whose key is `low`; V if there are fewer."""
    seen = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32) + V
    for start in range(0, V, BLOCK):
        at, _, key = block_of(row, start, temperature, V, BLOCK)
        is_on = ((key == low) & (at < V)).to(tl.int32)
        is_nth = (is_on > 0) & (seen + tl.cumsum(is_on, 0) == n)
        last = tl.minimum(last, tl.min(tl.where(is_nth, at, V), 0))
        seen += tl.sum(is_on, 0)
    return last


@kernel
def _nucleus(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Key and last id of the entries from `low` on with less than top_p of them before them."""
    whole = sum_from(row, temperature, peak, low, V, BLOCK, True).to(tl.float64)
    # above 0, which every key reaches: with a top_p of 0 the largest entry stays
    target = tl.maximum(top_p * whole, 1e-30)
    edge = largest_reaching(row, temperature, peak, low, target, V, BLOCK, True)
    edge = tl.maximum(edge, low)
    above = sum_from(row, temperature, peak, edge + 1, V, BLOCK, True).to(tl.float64)
    weight = tl.exp(number(edge) - peak).to(tl.float64)
    n = tl.maximum(tl.ceil((target - above) / weight), 1.0)
    # a weight that has become 0 makes it infinite, which no integer is
    n = tl.minimum(n, 1.0 * V).to(tl.int32)
    return edge, nth_on(row, temperature, edge, n, V, BLOCK)


@kernel
def floor_of(peak: tl.tensor, min_p: tl.tensor) -> Any:
    """The key below which min-p drops entries."""
    return tl.where(
        min_p > 0.0, ordered((peak.to(tl.float64) + tl.log(min_p)).to(tl.float32)), 0
    ).to(tl.uint32)


@kernel
def searched(
    row: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Result of top-k and top-p on the entries from key `floor` on: `low` and `last` of
    `is_kept`. The peak is finite.
    """
    low = floor
    last = tl.zeros((), tl.int32) + V
    if (top_k > 0.0) & (top_k < V):
        none = tl.zeros((), tl.uint32)
        kth = largest_reaching(row, temperature, peak, none, top_k, V, BLOCK, False)
        low = tl.maximum(low, kth)
    if top_p < 1.0:
        low, last = _nucleus(row, temperature, peak, low, top_p, V, BLOCK)
    return low, last
