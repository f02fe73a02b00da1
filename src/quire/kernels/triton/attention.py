"""Causal attention over paged KV: one kernel for prefill, decode and mixed steps.

A program holds a tile of queries that read the same KV head (all query heads of that KV head, for
some consecutive new tokens of one row) and walks over the keys in blocks, with an online softmax
(Milakov & Gimelshein 2018; Dao et al. 2022). Where rows are few, several programs share the keys of
a tile, and a second kernel merges their results (Dao et al. 2023, "Flash-Decoding").

Blocks of keys lie at absolute positions, and a block that a query does not see changes nothing. So
with one shape of tiles and without sharing, a query's bits depend on nothing but itself and the
keys that it sees: not on the other rows, and not on how its prompt was cut.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.kv import PagedKV
from quire.kernels.triton.launch import FLOAT32_WARPS, dense, dot_type, kernel, power_of_2
from quire.kernels.triton.plan import Tiles, TritonPlan
from quire.ops.attention import AttentionArgs
from quire.ops.kv import LARGEST_NUMBER

_LEAST_DOT = 16
"""tl.dot takes no smaller side."""

_FLOAT32_LINES = 32
"""Of a program at most, unless one token has more query heads; see FLOAT32_WARPS."""


@kernel
def _key_blocks(
    first: tl.tensor,
    num_new: tl.tensor,
    seq_len: tl.tensor,
    split: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> Any:
    """The keys low..end that a tile's queries can see, and the blocks of them, at absolute
    positions, that share `split` takes.
    """
    last_query = tl.minimum(first + QUERIES, num_new) - 1
    end = tl.where(first < num_new, seq_len - num_new + last_query + 1, 0)
    low = end * 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - num_new + first - WINDOW + 1, 0)
    start_block = low // BLOCK_N
    end_block = (end + BLOCK_N - 1) // BLOCK_N
    if SPLITS > 1:
        share = (end_block - start_block + SPLITS - 1) // SPLITS
        start_block += split * share
        end_block = tl.minimum(start_block + share, end_block)
    return low, end, start_block, end_block


@kernel
def _capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> Any:
    """softcap * tanh(score / softcap)."""
    turns = scores / SOFTCAP
    turned = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(turns)))
    return SOFTCAP * tl.where(turns < 0.0, -turned, turned)


@kernel
def _masked_scores(
    products: tl.tensor,
    key: tl.tensor,
    position: tl.tensor,
    is_key: tl.tensor,
    slope: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
) -> Any:
    """Products q.k [M, N] as scores in units of log2; -inf where a query does not see a key."""
    log2_e: tl.constexpr = 1.4426950408889634
    scores = products * SCALE
    if SOFTCAP > 0.0:
        scores = _capped(scores, SOFTCAP)
    if HAS_ALIBI:
        scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    sees = is_key[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        sees = sees & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(sees, scores * log2_e, float("-inf"))


@kernel
def _weights(scores: tl.tensor, best: tl.tensor) -> Any:
    """Weights [M, N] of scores beside the best of them and of those before, by what the sums so far
    shrink, and the new best.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    return tl.exp2(scores - shift[:, None]), tl.exp2(best - shift), new_best


@kernel
def _attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    split_out: tl.tensor,
    split_stats: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_width: int,
    table_rows: tl.tensor,
    tile_rows: tl.tensor,
    tile_starts: tl.tensor,
    sinks: tl.tensor,
    alibi: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    PIECES: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Piece program_id(0) of the tiles, KV head program_id(1), share program_id(2) of the keys.

    STEPS: the largest number of the memory's type, where it has scales; else 0.
    """
    tile = tl.program_id(0) // PIECES
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = H // K
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_starts + tile) + tl.program_id(0) % PIECES * QUERIES
    begin = tl.load(query_start + row)
    num_new = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)

    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    query = first + m // group
    head = kv_head * group + m % group
    is_query = (m < QUERIES * group) & (query < num_new)
    token = (begin + query).to(tl.int64)
    position = seq_len - num_new + query
    inside = is_query[:, None] & (d < D)[None, :]
    q_at = token[:, None] * (H * D) + head[:, None] * D + d[None, :]
    q_tile = tl.load(q + q_at, inside, other=0.0).to(DOT)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi + head, is_query, other=0.0).to(tl.float32)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_width

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    low, end, start_block, end_block = _key_blocks(
        first, num_new, seq_len, split, QUERIES, WINDOW, BLOCK_N, SPLITS
    )
    for block in range(start_block, end_block):
        key = block * BLOCK_N + n
        is_key = (key >= low) & (key < end)
        page = tl.load(table + key // S, is_key, other=0)
        lane = (page.to(tl.int64) * S + key % S) * K + kv_head
        k_at = keys + lane[None, :] * D + d[:, None]
        k_tile = tl.load(k_at, is_key[None, :] & (d < D)[:, None], other=0.0)
        products = tl.dot(q_tile, k_tile.to(DOT), input_precision="ieee")
        if STEPS > 0.0:
            products *= tl.load(key_scales + lane, is_key, other=0.0)[None, :]
        scores = _masked_scores(
            products, key, position, is_key, slope, SCALE, SOFTCAP, WINDOW, HAS_ALIBI
        )
        weights, shrink, best = _weights(scores, best)
        total = total * shrink + tl.sum(weights, 1)
        v_at = values + lane[:, None] * D + d[None, :]
        v_tile = tl.load(v_at, is_key[:, None] & (d < D)[None, :], other=0.0)
        if STEPS > 0.0:  # times the largest magnitude: scales are too small for float16
            weights *= (tl.load(value_scales + lane, is_key, other=0.0) * STEPS)[None, :]
        sums = tl.dot(
            weights.to(DOT), v_tile.to(DOT), sums * shrink[:, None], input_precision="ieee"
        )

    if STEPS > 0.0:
        sums /= STEPS
    if SPLITS > 1:
        at = (tile.to(tl.int64) * H + head) * SPLITS + split
        tl.store(split_out + at[:, None] * D + d[None, :], sums, inside)
        tl.store(split_stats + at * 2, best, is_query)
        tl.store(split_stats + at * 2 + 1, total, is_query)
    else:
        if HAS_SINKS:
            sink = _sink(sinks, head, is_query)
            top = tl.maximum(best, sink)
            shrink = tl.exp2(best - top)
            sums *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - top)
        y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + q_at, y.to(out.dtype.element_ty), inside)


@kernel
def _sink(sinks: tl.tensor, head: tl.tensor, is_query: tl.tensor) -> Any:
    """The score that a head always has beside its keys', in units of log2."""
    log2_e: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head, is_query, other=0.0).to(tl.float32) * log2_e


@kernel
def _merge_kernel(
    split_out: tl.tensor,
    split_stats: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    query_start: tl.tensor,
    sinks: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """The shares of a tile, which is one token (program 0), and head (program 1) become one."""
    row = tl.load(tokens + tl.program_id(0))
    head = tl.program_id(1)
    begin = tl.load(query_start + row)
    if tl.load(query_start + row + 1) > begin:
        s = tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        at = (tl.program_id(0).to(tl.int64) * H + head) * SPLITS + s
        best = tl.load(split_stats + at * 2, s < SPLITS, other=float("-inf"))
        total = tl.load(split_stats + at * 2 + 1, s < SPLITS, other=0.0)
        top = tl.max(best, 0)
        if HAS_SINKS:
            sink = _sink(sinks, head, head < H)
            top = tl.maximum(top, sink)
        shrink = tl.exp2(best - top)
        total = tl.sum(total * shrink, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - top)
        inside = (s < SPLITS)[:, None] & (d < D)[None, :]
        sums = tl.load(split_out + at[:, None] * D + d[None, :], inside, other=0.0)
        y = tl.sum(sums * shrink[:, None], 0) / total
        to = (begin.to(tl.int64) * H + head) * D + d
        tl.store(out + to, y.to(out.dtype.element_ty), d < D)


def attend(q: Tensor, kv: PagedKV, plan: TritonPlan, args: AttentionArgs) -> Tensor:
    """See `quire.ops.attention.attend`."""
    assert args.window == plan.window, "the plan was made for another window"
    assert kv.block_size == plan.block_size
    q = dense(q)
    num_tokens, heads, head_dim = q.shape
    out = q.new_empty(num_tokens, heads * head_dim)
    for tiles in plan.launches:
        _launch(q, kv, plan, args, tiles, out)
    return out


def _launch(
    q: Tensor, kv: PagedKV, plan: TritonPlan, args: AttentionArgs, tiles: Tiles, out: Tensor
) -> None:
    """Run the programs of some tiles, and join what those found that share keys."""
    _, heads, head_dim = q.shape
    splits = tiles.num_splits
    shares = _room_for_shares(q, tiles) if splits > 1 else (out, out)
    queries, block_m = _lines(tiles, heads // kv.kv_heads, q.dtype)
    pieces = tiles.num_queries // queries
    sinks = q if args.sinks is None else args.sinks
    facts = {"H": heads, "D": head_dim, "BLOCK_D": power_of_2(head_dim, _LEAST_DOT)}
    facts |= {"SPLITS": splits, "HAS_SINKS": args.sinks is not None}
    _attend_kernel[(len(tiles.rows) * pieces, kv.kv_heads, splits)](
        *(q, kv.keys, kv.values, *(kv.scales if kv.scales is not None else (q, q))),
        *(out, *shares, plan.query_start, plan.seq_lens),
        *(plan.block_table, plan.block_table.stride(0), plan.table_rows),
        *(tiles.rows, tiles.starts, sinks, q if args.alibi is None else args.alibi),
        PIECES=pieces,
        QUERIES=queries,
        BLOCK_M=block_m,
        DOT=dot_type(q.dtype),
        **_tiling(block_m, head_dim, q.dtype),
        **_layer_facts(kv, args),
        **facts,
    )
    if splits > 1:
        _merge_kernel[(len(tiles.rows), heads)](
            *(*shares, out, tiles.rows, plan.query_start, sinks),
            BLOCK_S=power_of_2(splits),
            num_warps=1,
            **facts,
        )


def _lines(tiles: Tiles, group: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries of a program, and lines of its product. All query heads of the KV head stand beside
    each other in a program: so many fewer tokens.
    """
    least, best = tiles.shape
    if dtype is torch.float32:
        least, best = min(least, _FLOAT32_LINES), min(best, _FLOAT32_LINES)
    queries = min(tiles.num_queries, max(1, power_of_2(best // group + 1) // 2))
    return queries, power_of_2(queries * group, least)


def _tiling(lines: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Keys of a block, warps, and loads under way: what the registers and the shared memory of an
    SM hold. What does not fit is spilled to memory, or does not start.
    """
    if dtype is torch.float32:
        return {"BLOCK_N": 16, "num_warps": FLOAT32_WARPS, "num_stages": 1}
    is_wide = head_dim > 128
    return {
        "BLOCK_N": 64 if lines > 16 or is_wide else 128,
        "num_warps": 8 if lines > (16 if is_wide else 64) else 4,
        "num_stages": 2 if lines <= 16 else 3,
    }


def _room_for_shares(q: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """For each tile, of one token: sums [tiles, H, splits, D], and the best score and the total
    weight [tiles, H, splits, 2]. Not for each token of the step: a prompt beside one decode would
    take gigabytes that no warm-up has seen.
    """
    assert tiles.num_queries == 1
    _, heads, head_dim = q.shape
    lead = (len(tiles.rows), heads, tiles.num_splits)
    sums, stats = (q.new_empty(*lead, last, dtype=torch.float32) for last in (head_dim, 2))
    return sums, stats


def _layer_facts(kv: PagedKV, args: AttentionArgs) -> dict[str, Any]:
    return {
        "K": kv.kv_heads,
        "S": kv.block_size,
        "SCALE": args.scale,
        "SOFTCAP": args.softcap or 0.0,
        "WINDOW": args.window or 0,
        "HAS_ALIBI": args.alibi is not None,
        "STEPS": 0.0 if kv.scales is None else LARGEST_NUMBER[kv.dtype],
    }
