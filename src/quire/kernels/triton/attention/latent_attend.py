"""Attention over paged latents (multi-head latent attention in its absorbed form): one kernel for
prefill, decode and mixed steps.

All heads of all tokens read the same latents, so a tile's lines are queries in the order of memory,
tokens times heads, cut without regard to where a token ends. A block of latents is read once: times
the queries it makes the scores, times the weights the means. What `attend` says of blocks of keys,
of shares and of bits holds here too.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.attend import (
    MERGED,
    log2_e,
    merge_kernel,
    room_for_shares,
    within_page,
)
from quire.kernels.triton.attention.triton_plan import Tiles, TritonPlan
from quire.kernels.triton.launch import (
    FLOAT32_WARPS,
    dot_type,
    kernel,
    power_of_2,
    readable,
    shared_memory,
)
from quire.kernels.triton.linear.product_kernel import is_below
from quire.ops.kv import LayerLatents

_LEAST_DOT = 16
"""tl.dot takes no smaller side."""

_FEW_LINES = 32
"""Lines of a program that multiplies in float32, or has little shared memory."""

_FOR_MANY_LINES = 128 << 10
"""Bytes of shared memory from which a program has more lines: not on Ada."""

_OF_FEW_LINES = ((32, 4, 3), (32, 4, 2), (16, 4, 2), (16, 4, 1))
_OF_MANY_LINES = ((64, 8, 3), (32, 8, 3), (32, 8, 2), (16, 8, 2), (16, 8, 1))
"""Keys of a block, warps and blocks in shared memory, the best that fit first."""

_FOR_RESULTS = 4 << 10
"""Bytes of shared memory that blocks leave for layouts to be changed."""

_FLOAT32_COLUMNS = 64
"""Columns of a latent that a program multiplies at once, and whose means it makes: without tensor
cores every thread keeps whole rows of the operands in registers.
"""


@kernel
def _pages(
    table: tl.tensor, block: tl.tensor, end: tl.tensor, S: tl.constexpr, BLOCK_N: tl.constexpr
) -> Any:
    """The pages of a block's keys, each once where blocks are whole pages or pages whole blocks: of
    every key, they take registers that the means need.
    """
    if S % BLOCK_N == 0:
        return tl.load(table + block // (S // BLOCK_N), block * BLOCK_N < end, other=0)
    elif BLOCK_N % S == 0:  # elif and else: paths for the compiler, not for Python
        entry = block * (BLOCK_N // S) + tl.arange(0, BLOCK_N // S)
        return tl.load(table + entry, entry * S < end, other=0)
    else:
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + key // S, key < end, other=0)


@kernel
def _of_keys(pages: tl.tensor, S: tl.constexpr, BLOCK_N: tl.constexpr) -> Any:
    """Pages as `_pages` returns them -> the page of each key [N]."""
    if S % BLOCK_N == 0:
        return pages + tl.zeros((BLOCK_N,), tl.int32)
    elif BLOCK_N % S == 0:  # elif and else: paths for the compiler, not for Python
        return tl.reshape(tl.broadcast_to(pages[:, None], (BLOCK_N // S, S)), (BLOCK_N,))
    else:
        return pages


@kernel
def _line_at(
    begin: tl.tensor, line: tl.tensor, H: tl.constexpr, TOKEN: tl.constexpr, HEAD: tl.constexpr
) -> Any:
    """Offset of line `line` of the tokens from `begin` on: line by line in most tensors."""
    if TOKEN == H * HEAD:
        return (begin.to(tl.int64) * H + line) * HEAD
    else:  # a second path for the compiler, not for Python
        return (begin + line // H).to(tl.int64) * TOKEN + line % H * HEAD


@kernel
def _latent_attend_kernel(
    q: tl.tensor,
    q_rotated: tl.tensor,
    latents: tl.tensor,
    out: tl.tensor,
    share_out: tl.tensor,
    share_stats: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_width: int,
    pieces: int,
    table_rows: tl.tensor,
    tile_rows: tl.tensor,
    tile_starts: tl.tensor,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    R_TOKEN: tl.constexpr,
    R_HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    SHARES: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Columns program_id(1) of the means of piece program_id(0) of the tiles, of prompts from the
    last on.

    pieces: of a tile; a number and not a constant, so that prompts and decodes whose bits may not
    differ are served by one compiled variant. SHARES: see `_attend_kernel`. PAGE: from one page to
    the next, in numbers. COLUMNS: of a latent, at once; where that is not all of them, the scores
    are summed up over several reads.
    """
    program = tl.program_id(0)
    if not SHARES:  # the last tokens of prompts, which see most keys, are not left for the end
        program = tl.num_programs(0) - 1 - program
    tile = program // pieces
    part = tl.program_id(1)
    is_whole: tl.constexpr = COLUMNS == BLOCK_RANK
    row = tl.load(tile_rows + tile)
    first = program % pieces * BLOCK_M
    share, num_shares = 0, 1
    if SHARES:
        first_share = tl.load(tile_starts + row)
        num_shares = tl.load(tile_starts + row + 1) - first_share
        share = tile - first_share
    else:
        first += tl.load(tile_starts + tile) * H
    begin = tl.load(query_start + row)
    num_new = tl.load(query_start + row + 1) - begin
    seq_len = tl.load(seq_lens + row)
    if SHARES:
        num_new = tl.where(share < num_shares, num_new, 0)  # a spare program without work

    line = first + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    column, rotated = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_ROTATED)
    is_query = line < num_new * H
    position = seq_len - num_new + line // H
    q_at = _line_at(begin, line, H, Q_TOKEN, Q_HEAD)
    r_at = _line_at(begin, line, H, R_TOKEN, R_HEAD)
    is_turned = is_query[:, None] & is_below(rotated, ROTATED, BLOCK_ROTATED)[None, :]
    turned = tl.load(q_rotated + r_at[:, None] + rotated[None, :], is_turned, other=0.0).to(DOT)
    if is_whole:
        inside = is_query[:, None] & is_below(column, RANK, COLUMNS)[None, :]
        q_tile = tl.load(q + q_at[:, None] + column[None, :], inside, other=0.0).to(DOT)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_width

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    unit: tl.constexpr = SCALE * log2_e()
    last = tl.minimum((first + BLOCK_M - 1) // H, num_new - 1)
    end = tl.where(first // H < num_new, seq_len - num_new + last + 1, 0)
    start_block, end_block = 0, (end + BLOCK_N - 1) // BLOCK_N
    if SHARES:
        length = (end_block + num_shares - 1) // num_shares
        start_block = share * length
        end_block = tl.minimum(start_block + length, end_block)
    value_column = part * COLUMNS + column
    pages = _pages(table, start_block, end, S, BLOCK_N)
    for block in range(start_block, end_block):
        key = block * BLOCK_N + n
        page = latents + _of_keys(pages, S, BLOCK_N).to(tl.int64) * PAGE
        at = within_page(key, n, S, BLOCK_N) * (RANK + ROTATED)
        # ahead of their use, so that nothing waits for them between two blocks
        pages = _pages(table, block + 1, end, S, BLOCK_N)
        is_key = key < end
        is_value = is_key[:, None] & is_below(value_column, RANK, COLUMNS)[None, :]
        values = tl.load(
            page[:, None] + (at[:, None] + value_column[None, :]), is_value, other=0.0
        ).to(DOT)
        if is_whole:
            products = tl.dot(q_tile, tl.trans(values), input_precision="ieee")
        else:
            products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, BLOCK_RANK, COLUMNS):
                is_column = is_below(start + column, RANK, COLUMNS)[None, :]
                q_part = tl.load(
                    q + q_at[:, None] + start + column[None, :],
                    is_query[:, None] & is_column,
                    other=0.0,
                )
                k_part = tl.load(
                    page[:, None] + (at[:, None] + start + column[None, :]),
                    is_key[:, None] & is_column,
                    other=0.0,
                )
                products = tl.dot(
                    q_part.to(DOT), tl.trans(k_part.to(DOT)), products, input_precision="ieee"
                )
        is_turned_key = is_key[:, None] & is_below(rotated, ROTATED, BLOCK_ROTATED)[None, :]
        turned_keys = tl.load(
            page[:, None] + (at[:, None] + RANK + rotated[None, :]), is_turned_key, other=0.0
        ).to(DOT)
        products = tl.dot(turned, tl.trans(turned_keys), products, input_precision="ieee")
        sees = key[None, :] <= position[:, None]
        scores = tl.where(sees, products, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best) * unit
        weights = tl.exp2(scores * unit - shift[:, None])
        # exactly 1 where a block brings nothing, as in attend.py
        shrink = tl.where(new_best > best, tl.exp2(best * unit - shift), 1.0)
        best = new_best
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(DOT), values, sums * shrink[:, None], input_precision="ieee")
    best *= unit

    to = is_query[:, None] & is_below(value_column, RANK, COLUMNS)[None, :]
    if num_shares > 1:
        share_at = tile.to(tl.int64) * H + line  # of one token
        tl.store(share_out + share_at[:, None] * RANK + value_column[None, :], sums, to)
        # all parts of the columns have found the same scores
        if part == 0:
            tl.store(share_stats + share_at * 2, best, is_query)
            tl.store(share_stats + share_at * 2 + 1, total, is_query)
    else:
        y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = _line_at(begin, line, H, H * RANK, RANK)
        tl.store(out + out_at[:, None] + value_column[None, :], y.to(out.dtype.element_ty), to)


def latent_attend(
    q: Tensor, q_rotated: Tensor, latents: LayerLatents, plan: TritonPlan, scale: float
) -> Tensor:
    """See `quire.ops.mixers.latent.latent_attend`."""
    assert latents.block_size == plan.block_size
    assert latents.data.stride()[1:] == (latents.width, 1)
    q, q_rotated = readable(q), readable(q_rotated)
    out = q.new_empty(q.shape)
    for tiles in plan.launches:
        _launch(q, q_rotated, latents, plan, scale, tiles, out)
    return out


def _launch(
    q: Tensor,
    q_rotated: Tensor,
    latents: LayerLatents,
    plan: TritonPlan,
    scale: float,
    tiles: Tiles,
    out: Tensor,
) -> None:
    """Run the programs of some tiles, and join what those found that share keys."""
    _, heads, rank = q.shape
    shares = room_for_shares(q, len(tiles.rows)) if tiles.shares_keys else (out, out)
    lines = tiles.num_queries * heads
    room = shared_memory(q.device)
    block_m = latent_lines(tiles, heads, q.dtype, room)
    assert tiles.num_queries == 1 or lines % block_m == 0
    block_rank = power_of_2(rank, _LEAST_DOT)
    block_rotated = power_of_2(q_rotated.shape[2], _LEAST_DOT)
    columns = min(block_rank, _FLOAT32_COLUMNS) if q.dtype is torch.float32 else block_rank
    pieces = -(-lines // block_m)
    _latent_attend_kernel[(len(tiles.rows) * pieces, block_rank // columns)](
        *(q, q_rotated, latents.data, out, *shares, plan.query_start, plan.seq_lens),
        *(plan.block_table, plan.block_table.stride(0), pieces, plan.table_rows),
        *(tiles.rows, tiles.starts),
        H=heads,
        RANK=rank,
        ROTATED=q_rotated.shape[2],
        S=latents.block_size,
        PAGE=latents.data.stride(0),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        R_TOKEN=q_rotated.stride(0),
        R_HEAD=q_rotated.stride(1),
        BLOCK_M=block_m,
        BLOCK_RANK=block_rank,
        BLOCK_ROTATED=block_rotated,
        COLUMNS=columns,
        SCALE=scale,
        SHARES=tiles.shares_keys,
        DOT=dot_type(q.dtype),
        **latent_tiling(block_m, block_rank + block_rotated, q.dtype, room),
    )
    if tiles.shares_keys:
        merge_kernel[(len(plan.table_rows), heads)](
            *(*shares, out, tiles.starts, plan.query_start, q),
            H=heads,
            D=rank,
            BLOCK_D=block_rank,
            BLOCK_S=MERGED,
            HAS_SINKS=False,
            num_warps=4,
        )


def latent_lines(tiles: Tiles, heads: int, dtype: torch.dtype, shared_memory: int) -> int:
    """Lines of a program's product: queries of some tokens and heads."""
    least, best = tiles.shape
    if dtype is torch.float32 or shared_memory < _FOR_MANY_LINES:
        least, best = min(least, _FEW_LINES), min(best, _FEW_LINES)
    return min(best, power_of_2(tiles.num_queries * heads, least))


def latent_tiling(lines: int, width: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """Keys of a block, warps, and blocks of `width` columns in shared memory; see `tiling` of
    ordinary attention.

    Of many lines the means leave no registers for a second program, so that a program has all of
    the shared memory. Three blocks there are better than two twice as large: of two, the copy of
    the next block begins when the scores of this one are there.
    """
    if dtype is torch.float32:
        return {"BLOCK_N": 16, "num_warps": FLOAT32_WARPS, "num_stages": 1}
    rows = (shared_memory - _FOR_RESULTS) // (width * dtype.itemsize)
    tiles = _OF_FEW_LINES if lines <= _FEW_LINES else _OF_MANY_LINES
    fitting = (tile for tile in tiles if lines + tile[0] * tile[2] <= rows)
    keys, warps, stages = next(fitting, tiles[-1])
    return {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
