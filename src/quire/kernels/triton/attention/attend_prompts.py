"""Attention within whole prompts, as encoders have it: queries also see what follows them.

A program holds a tile of a prompt's queries, those of all query heads of one KV head, and walks
over the keys that they see in blocks, with the online softmax of `attend`. Tiles and blocks are
counted from the prompt's first token, and tiles have one shape, so a prompt's bits do not depend on
what else is in the step.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.attend import lines_of, log2_e, tiling
from quire.kernels.triton.attention.triton_plan import Means, Tiles, tiles_of_prompts
from quire.kernels.triton.launch import dot_type, kernel, power_of_2, readable
from quire.ops.step_rows import StepRows

_LEAST_DOT = 16
"""tl.dot takes no smaller side."""


@dataclass(frozen=True, slots=True)
class TritonPrompts:
    """The prompts of a step, which have the tokens query_start[r] .. query_start[r + 1] - 1.
    `tiles`: None where there are no tokens. `host` is query_start as it was given.
    """

    query_start: Tensor
    tiles: Tiles | None
    host: np.ndarray
    means: Means
    window: int | None = None  # layers bring their own

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `AttentionPlan`."""
        lengths = np.diff(self.host)
        return lengths, lengths

    def refill(self, step: StepRows) -> TritonPrompts:
        """A plan for another step; see `AttentionPlan`. No block is looked at."""
        starts, lengths = step.query_start, step.seq_lens
        return plan_prompts(query_start=starts, seq_lens=lengths, means=self.means)


def plan_prompts(*, query_start: np.ndarray, seq_lens: np.ndarray, means: Means) -> TritonPrompts:
    """See `quire.ops.mixers.prompts.plan_prompts`."""
    lengths = np.diff(query_start)
    assert np.array_equal(lengths, seq_lens), "a prompt is not whole"
    found = lengths.nonzero()[0]
    tiles = tiles_of_prompts(found, lengths, means) if len(found) else None
    start = means.upload(query_start.astype(np.int32))
    return TritonPrompts(start, tiles, query_start.copy(), means)


@kernel
def _attend_prompts_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    query_start: tl.tensor,
    tile_rows: tl.tensor,
    tile_starts: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PIECES: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Piece program_id(0) of the tiles, KV head program_id(1). Q_TOKEN, Q_HEAD, ...: from one token
    or head of q, k and v to the next.
    """
    tile = tl.program_id(0) // PIECES
    kv_head = tl.program_id(1)
    group: tl.constexpr = H // K
    unit: tl.constexpr = SCALE * log2_e()
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_starts + tile) + tl.program_id(0) % PIECES * QUERIES
    begin = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - begin

    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    query = first + m // group
    head = kv_head * group + m % group
    inside = ((m < QUERIES * group) & (query < length))[:, None] & (d < D)[None, :]
    token = (begin + query).to(tl.int64)
    q_at = token[:, None] * Q_TOKEN + head[:, None] * Q_HEAD + d[None, :]
    q_tile = tl.load(q + q_at, inside, other=0.0).to(DOT)

    low, end = 0, tl.where(first < length, length, 0)
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        end = tl.minimum(end, first + QUERIES + WINDOW - 1)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(low // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N):
        key = block * BLOCK_N + n
        sees = (key < end)[None, :]
        if WINDOW > 0:
            near = tl.abs(key[None, :] - query[:, None]) < WINDOW
            sees = sees & near
        is_key = (key < end)[:, None] & (d < D)[None, :]
        at = (begin + key).to(tl.int64)[:, None]
        k_tile = tl.load(k + at * K_TOKEN + kv_head * K_HEAD + d[None, :], is_key, other=0.0)
        v_tile = tl.load(v + at * V_TOKEN + kv_head * V_HEAD + d[None, :], is_key, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile.to(DOT)), input_precision="ieee")
        scores = tl.where(sees, scores * unit, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # -inf minus -inf would be NaN in lines that have seen no key yet
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        best = new_best
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(
            weights.to(DOT), v_tile.to(DOT), sums * shrink[:, None], input_precision="ieee"
        )
    y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (token[:, None] * H + head[:, None]) * D + d[None, :]
    tl.store(out + out_at, y.to(out.dtype.element_ty), inside)


def attend_prompts(
    q: Tensor, k: Tensor, v: Tensor, plan: TritonPrompts, *, scale: float, window: int | None
) -> Tensor:
    """See `quire.ops.mixers.prompts.attend_prompts`."""
    num_tokens, heads, head_dim = q.shape
    out = q.new_empty(num_tokens, heads * head_dim)
    # rows after the last prompt, which no program writes
    out[int(plan.host[-1]) :] = 0
    if plan.tiles is None:
        return out
    q, k, v = readable(q), readable(k), readable(v)
    tiles, kv_heads = plan.tiles, k.shape[1]
    queries, block_m = lines_of(tiles, heads // kv_heads, q.dtype)
    pieces = tiles.num_queries // queries
    _attend_prompts_kernel[(len(tiles.rows) * pieces, kv_heads)](
        *(q, k, v, out, plan.query_start, tiles.rows, tiles.starts),
        H=heads,
        K=kv_heads,
        D=head_dim,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        K_TOKEN=k.stride(0),
        K_HEAD=k.stride(1),
        V_TOKEN=v.stride(0),
        V_HEAD=v.stride(1),
        PIECES=pieces,
        QUERIES=queries,
        BLOCK_M=block_m,
        BLOCK_D=power_of_2(head_dim, _LEAST_DOT),
        SCALE=scale,
        WINDOW=window or 0,
        DOT=dot_type(q.dtype),
        **tiling(block_m, head_dim, q.dtype, q.element_size()),
    )
    return out
