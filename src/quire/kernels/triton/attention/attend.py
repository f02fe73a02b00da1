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

from quire.kernels.triton.attention.paged_kv import PagedKV
from quire.kernels.triton.attention.triton_plan import Tiles, TritonPlan
from quire.kernels.triton.launch import FLOAT32_WARPS, dense, dot_type, kernel, power_of_2
from quire.ops.attention import AttentionArgs
from quire.ops.kv import LARGEST_NUMBER

_LEAST_DOT = 16
"""tl.dot takes no smaller side."""

_FLOAT32_LINES = 32
"""Most lines of a program, unless one token has more query heads; see FLOAT32_WARPS."""

MERGED = 16
"""Shares that are merged at once."""


@kernel
def log2_e() -> Any:
    """Scores times this are powers of two."""
    return 1.4426950408889634


@kernel
def _seen_keys(
    first: tl.tensor,
    num_new: tl.tensor,
    seq_len: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> Any:
    """The keys low..end-1 that the queries of a tile can see."""
    last = tl.minimum(first + QUERIES, num_new) - 1
    end = tl.where(first < num_new, seq_len - num_new + last + 1, 0)
    low = end * 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - num_new + first - WINDOW + 1, 0)
    return low, end


@kernel
def pages_of(
    table: tl.tensor,
    block: tl.tensor,
    n: tl.tensor,
    low: tl.tensor,
    end: tl.tensor,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> Any:
    """The pages of a block's keys [N]; 0 for keys that no query of the tile sees, of which the
    table may say anything.
    """
    key = block * BLOCK_N + n
    entry = key // S
    if BLOCK_N % S == 0:
        entry = block * (BLOCK_N // S) + n // S
    return tl.load(table + entry, (key >= low) & (key < end), other=0)


@kernel
def within_page(key: tl.tensor, n: tl.tensor, S: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Offsets of keys within their pages."""
    if BLOCK_N % S == 0:
        return n % S
    return key % S


@kernel
def _capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> Any:
    """softcap * tanh(score / softcap)."""
    turns = scores / SOFTCAP
    # tanh of the magnitude: where the exponential overflows, the quotient is 0
    turned = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(turns)))
    return SOFTCAP * tl.where(turns < 0.0, -turned, turned)


@kernel
def _scores(
    products: tl.tensor,
    key: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
) -> Any:
    """Products q.k [M, N] as scores; see _unit."""
    scores = products
    if SOFTCAP > 0.0:
        scores = _capped(scores * SCALE, SOFTCAP)
    elif HAS_ALIBI:
        scores *= SCALE
    if HAS_ALIBI:
        scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    return scores


@kernel
def _unit(SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr) -> Any:
    """The factor that makes products of _scores powers of two. Where nothing is done to products
    but this, they are the scores, and weighing them is one operation.
    """
    if SOFTCAP > 0.0 or HAS_ALIBI:
        return log2_e()
    return SCALE * log2_e()


@kernel
def _walk(
    best: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    start_block: tl.tensor,
    end_block: tl.tensor,
    low: tl.tensor,
    end: tl.tensor,
    q_tile: tl.tensor,
    position: tl.tensor,
    nearest: tl.tensor,
    farthest: tl.tensor,
    slope: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    MASKS: tl.constexpr,
) -> Any:
    """Best scores, total weights and sums of values, with the blocks of keys start_block up to
    end_block. Queries see keys up to `nearest`, with a window those after `farthest`. MASKS: not
    every query sees every key of theirs.
    """
    unit: tl.constexpr = _unit(SCALE, SOFTCAP, HAS_ALIBI)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, q_tile.shape[1])
    pages = pages_of(table, start_block, n, low, end, S, BLOCK_N)
    for block in range(start_block, end_block):
        key = block * BLOCK_N + n
        lane = (pages.to(tl.int64) * PAGE + within_page(key, n, S, BLOCK_N)) * K + kv_head
        # ahead of their use, so that nothing waits for them between two blocks
        pages = pages_of(table, block + 1, n, low, end, S, BLOCK_N)
        is_key = (key >= low) & (key < end)
        at = lane[:, None] * D + d[None, :]
        inside = (d < D)[None, :]
        if MASKS:
            inside = inside & is_key[:, None]
        k_tile = tl.load(keys + at, inside, other=0.0)
        products = tl.dot(q_tile, tl.trans(k_tile.to(DOT)), input_precision="ieee")
        if STEPS > 0.0:
            products *= tl.load(key_scales + lane, is_key, other=0.0)[None, :]
        scores = _scores(products, key, position, slope, SCALE, SOFTCAP, HAS_ALIBI)
        if MASKS:
            sees = is_key[None, :] & (key[None, :] <= nearest[:, None])
            if WINDOW > 0:
                sees = sees & (key[None, :] > farthest[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # -inf minus -inf would be NaN in lines that have seen no key yet
        shift = tl.where(new_best == float("-inf"), 0.0, new_best) * unit
        weights = tl.exp2(scores * unit - shift[:, None])
        # exactly 1 where a block brings nothing: a fused multiply-subtract would leave the rounding
        # error of best * unit, and how many such blocks there are depends on the tile
        shrink = tl.where(new_best > best, tl.exp2(best * unit - shift), 1.0)
        best = new_best
        total = total * shrink + tl.sum(weights, 1)
        v_tile = tl.load(values + at, inside, other=0.0)
        if STEPS > 0.0:  # times the largest magnitude: scales are too small for float16
            weights *= (tl.load(value_scales + lane, is_key, other=0.0) * STEPS)[None, :]
        sums = tl.dot(
            weights.to(DOT), v_tile.to(DOT), sums * shrink[:, None], input_precision="ieee"
        )
    return best, total, sums


@kernel
def _attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    out: tl.tensor,
    share_out: tl.tensor,
    share_stats: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_width: int,
    table_rows: tl.tensor,
    whole: tl.tensor,
    tile_rows: tl.tensor,
    tile_starts: tl.tensor,
    sinks: tl.tensor,
    alibi: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
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
    HAS_SPANS: tl.constexpr,
    STEPS: tl.constexpr,
    SHARES: tl.constexpr,
    PLAIN_BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Piece program_id(0) of the tiles, KV head program_id(1).

    SHARES: programs share the keys of a row, which has one new token; those of row r are
    tile_starts[r] up to tile_starts[r + 1]. PLAIN_BLOCKS: blocks that all queries see whole are
    not masked. PAGE: from one page to the next, in slots. STEPS: the largest number of the memory's
    type, where it has scales; else 0. HAS_SPANS: new tokens of some rows see each other both ways;
    `whole` has them, as `SpanPlan.refill_spans` does.
    """
    tile = tl.program_id(0) // PIECES
    kv_head = tl.program_id(1)
    group: tl.constexpr = H // K
    row = tl.load(tile_rows + tile)
    first = tl.program_id(0) % PIECES * QUERIES
    share, num_shares = 0, 1
    if SHARES:
        first_share = tl.load(tile_starts + row)
        num_shares = tl.load(tile_starts + row + 1) - first_share
        share = tile - first_share
    else:
        first += tl.load(tile_starts + tile)
    begin = tl.load(query_start + row)
    num_new = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)
    if SHARES:
        num_new = tl.where(share < num_shares, num_new, 0)  # a spare program without work

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = first + m // group
    head = kv_head * group + m % group
    is_query = (m < QUERIES * group) & (query < num_new)
    # offsets of a long step's elements do not fit in 32 bits
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
    low, end = _seen_keys(first, num_new, seq_len, QUERIES, WINDOW)
    nearest, farthest = position, position - WINDOW
    if HAS_SPANS:
        kind, own = tl.load(whole + row), seq_len - num_new
        nearest = tl.where(kind > 0, seq_len - 1, nearest)
        end = tl.where((kind > 0) & (end > 0), seq_len, end)
        farthest = tl.where(kind > 1, tl.minimum(farthest, own - 1), farthest)
        low = tl.where(kind > 1, tl.minimum(low, own), low)
    start_block = low // BLOCK_N
    end_block = (end + BLOCK_N - 1) // BLOCK_N
    if SHARES:
        length = (end_block - start_block + num_shares - 1) // num_shares
        start_block += share * length
        end_block = tl.minimum(start_block + length, end_block)
    if PLAIN_BLOCKS:
        # blocks that the tile's first query sees as a whole need no masks: later queries see them,
        # too
        plain_end = tl.minimum(seq_len - num_new + first + 1, end) // BLOCK_N
        best, total, sums = _walk(
            *(best, total, sums, start_block, plain_end, low, end, q_tile, position),
            *(nearest, farthest, slope),
            *(table, kv_head, keys, values, key_scales, value_scales, K, D, S, PAGE),
            *(BLOCK_N, SCALE, SOFTCAP, WINDOW, HAS_ALIBI, STEPS, DOT, False),
        )
        start_block = plain_end
    best, total, sums = _walk(
        *(best, total, sums, start_block, end_block, low, end, q_tile, position),
        *(nearest, farthest, slope),
        *(table, kv_head, keys, values, key_scales, value_scales, K, D, S, PAGE),
        *(BLOCK_N, SCALE, SOFTCAP, WINDOW, HAS_ALIBI, STEPS, DOT, True),
    )
    best *= _unit(SCALE, SOFTCAP, HAS_ALIBI)

    if STEPS > 0.0:
        sums /= STEPS
    if num_shares > 1:
        at = tile.to(tl.int64) * H + head
        tl.store(share_out + at[:, None] * D + d[None, :], sums, inside)
        tl.store(share_stats + at * 2, best, is_query)
        tl.store(share_stats + at * 2 + 1, total, is_query)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, is_query, other=0.0).to(tl.float32) * log2_e()
            top = tl.maximum(best, sink)
            shrink = tl.exp2(best - top)
            sums *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - top)
        # lines beyond the queries have no weights at all
        y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + q_at, y.to(out.dtype.element_ty), inside)


@kernel
def merge_kernel(
    share_out: tl.tensor,
    share_stats: tl.tensor,
    out: tl.tensor,
    starts: tl.tensor,
    query_start: tl.tensor,
    sinks: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """The shares of a row (program 0) and head (program 1) become one, where there are several."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(starts + row), tl.load(starts + row + 1)
    # a row that one program has is finished there
    if stop > first + 1:
        s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        sums = tl.zeros((BLOCK_D,), tl.float32)
        if HAS_SINKS:
            top = tl.zeros((1,), tl.float32) + tl.load(sinks + head).to(tl.float32) * log2_e()
            # a sink is a score without a value: at the top it weighs 1
            total += 1.0
        for share in range(first, stop, BLOCK_S):
            is_share = share + s < stop
            at = (share + s).to(tl.int64) * H + head
            best = tl.load(share_stats + at * 2, is_share, other=float("-inf"))
            weights = tl.load(share_stats + at * 2 + 1, is_share, other=0.0)
            inside = is_share[:, None] & (d < D)[None, :]
            parts = tl.load(share_out + at[:, None] * D + d[None, :], inside, other=0.0)
            new_top = tl.maximum(top, tl.max(best, 0))
            grow = tl.exp2(best - new_top)
            shrink = tl.exp2(top - new_top)
            top = new_top
            total = total * shrink + tl.sum(weights * grow, 0)
            sums = sums * shrink + tl.sum(parts * grow[:, None], 0)
        to = (tl.load(query_start + row).to(tl.int64) * H + head) * D + d
        tl.store(out + to, (sums / total).to(out.dtype.element_ty), d < D)


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
    shares = room_for_shares(q, len(tiles.rows)) if tiles.shares_keys else (out, out)
    queries, block_m = lines_of(tiles, heads // kv.kv_heads, q.dtype)
    pieces = tiles.num_queries // queries
    sinks = q if args.sinks is None else args.sinks
    facts = {"H": heads, "D": head_dim, "BLOCK_D": power_of_2(head_dim, _LEAST_DOT)}
    facts |= {"HAS_SINKS": args.sinks is not None}
    _attend_kernel[(len(tiles.rows) * pieces, kv.kv_heads)](
        *(q, kv.keys, kv.values, *(kv.scales if kv.scales is not None else (q, q))),
        *(out, *shares, plan.query_start, plan.seq_lens),
        *(plan.block_table, plan.block_table.stride(0), plan.table_rows),
        plan.table_rows if plan.whole is None else plan.whole,
        *(tiles.rows, tiles.starts, sinks, q if args.alibi is None else args.alibi),
        PIECES=pieces,
        QUERIES=queries,
        BLOCK_M=block_m,
        DOT=dot_type(q.dtype),
        HAS_SPANS=plan.whole is not None,
        SHARES=tiles.shares_keys,
        PLAIN_BLOCKS=tiles.varies and queries > 1 and args.window is None,
        **tiling(block_m, head_dim, q.dtype, kv.memory.element_size(), is_crowded=tiles.is_crowded),
        **_layer_facts(kv, args),
        **facts,
    )
    if tiles.shares_keys:
        merge_kernel[(len(plan.table_rows), heads)](
            *(*shares, out, tiles.starts, plan.query_start, sinks),
            BLOCK_S=MERGED,
            num_warps=2,
            **facts,
        )


def lines_of(tiles: Tiles, group: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries of a program, and lines of its product. All `group` query heads of the KV head are in
    one program, which therefore has that many times fewer tokens.
    """
    least, best = tiles.shape
    if dtype is torch.float32:
        least, best = min(least, _FLOAT32_LINES), min(best, _FLOAT32_LINES)
    queries = min(tiles.num_queries, max(1, power_of_2(best // group + 1) // 2))
    return queries, power_of_2(queries * group, least)


def tiling(
    lines: int, head_dim: int, dtype: torch.dtype, stored_bytes: int, *, is_crowded: bool = False
) -> dict[str, int]:
    """Keys of a block, warps, and blocks under way: what the registers and the shared memory of an
    SM hold. What does not fit is spilled to memory, or does not start.

    Few lines wait for memory. In a crowd of rows one program with a block more on its way beats two
    on an SM (64 rows x 4,096 keys on an H200: 268 us instead of 295); where rows are few it is the
    other way round (8 rows: 53 us instead of 60). Numbers of 8 bits are widened in registers, which
    longer blocks hide better (64 rows in fp8: 276 us instead of 404). Many lines keep the tensor
    cores busy, with two groups of four warps.
    """
    if dtype is torch.float32:
        return {"BLOCK_N": 16, "num_warps": FLOAT32_WARPS, "num_stages": 1}
    is_wide = head_dim > 128
    if lines <= 16:
        if stored_bytes == 1:
            keys, stages = (32, 4) if is_wide else (128, 3)
        else:
            keys, stages = 32 if is_wide else 64, 4 if head_dim <= 64 or is_crowded else 3
        return {"BLOCK_N": keys, "num_warps": 4, "num_stages": stages}
    return {
        "BLOCK_N": 32 if is_wide else 64,
        "num_warps": 8 if lines > (16 if is_wide else 64) else 4,
        "num_stages": 3,
    }


def room_for_shares(q: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Sums [programs, H, D], and the best score and the total weight [programs, H, 2]."""
    _, heads, head_dim = q.shape
    shapes = (programs, heads, head_dim), (programs, heads, 2)
    sums, stats = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return sums, stats


def _layer_facts(kv: PagedKV, args: AttentionArgs) -> dict[str, Any]:
    return {
        "K": kv.kv_heads,
        "S": kv.block_size,
        "PAGE": kv.page_slots,
        "SCALE": args.scale,
        "SOFTCAP": args.softcap or 0.0,
        "WINDOW": args.window or 0,
        "HAS_ALIBI": args.alibi is not None,
        "STEPS": 0.0 if kv.scales is None else LARGEST_NUMBER[kv.dtype],
    }
