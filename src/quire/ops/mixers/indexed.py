"""Attention over chosen latents (DeepSeek sparse attention, DeepSeek-V3.2): a light indexer scores
every token that a query may see, and the query attends to the best. In MiniMax-M3 it attends to
whole blocks of keys, of which each group of heads chooses its own.

All ops look at one new token at a time and at all keys that it sees, in the order of positions: so
neither the choice nor the result depends on how a row's tokens are cut into steps, nor on other
rows. Everything is computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.attention_plan import PlainPlan, plan_rows
from quire.ops.kv import LayerLatents
from quire.ops.registry import WIDE, op

NO_TOKEN = -1
"""Stands where a query sees fewer tokens than it may choose."""


@op(format="indexed", only_for="indexed attention")
def plan_indexed(
    *, query_start: np.ndarray, seq_lens: np.ndarray, block_table: Tensor, block_size: int
) -> PlainPlan:
    """Prepare a step; the arguments are those of `plan_attention`."""
    return plan_rows(query_start, seq_lens, block_table, block_size, None)


@op(
    axes={"q": 0, "k": 0, "weights": 0, "slots": 0},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for="indexed attention",
)
def index_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    plan: PlainPlan,
    top_k: int,
) -> Tensor:
    """Store the keys k [T, I] of the choice in slots [T] int64 (PAD_SLOT: nowhere), and choose for
    each new token up to `top_k` of the tokens that it sees -> positions [T, top_k] int64,
    ascending, then NO_TOKEN.

    The score of a token is the sum over n heads of weights * relu(q . key) / sqrt(n I), of q [T, n,
    I] and weights [T, n]; of equal ones the first is taken.
    """
    assert latents.keys is not None, "this layer's tokens have no keys for the choice"
    store_rows(latents.keys, slots, k)
    wide = WIDE[q.dtype]
    heads, dim = q.shape[1:]
    chosen = torch.full((len(q), top_k), NO_TOKEN, dtype=torch.int64, device=q.device)
    for t, lanes in seen_by_token(plan):
        keys = rows_at(latents.keys, lanes).to(wide)
        scores = (q[t].to(wide) @ keys.t() * dim**-0.5).relu()
        total = (weights[t].to(wide) * heads**-0.5) @ scores
        best = total.sort(descending=True, stable=True).indices[:top_k]
        chosen[t, : len(best)] = best.sort().values
    return chosen


@op(
    axes={"q": 0, "q_rotated": 0, "chosen": 0},
    format="indexed",
    is_invariant=True,
    only_for="indexed attention",
)
def indexed_attend(
    q: Tensor,
    q_rotated: Tensor,
    chosen: Tensor,
    latents: LayerLatents,
    plan: PlainPlan,
    scale: float,
) -> Tensor:
    """Attention of q [T, H, r] and q_rotated [T, H, R] over the latents at the positions `chosen`
    [T, top_k] of their rows -> [T, H, r].

    The score of a key is scale * (q . latent + q_rotated . rotated key), its value is the latent.
    """
    wide, out = WIDE[q.dtype], torch.empty_like(q)
    for t, lanes in seen_by_token(plan):
        count = min(chosen.shape[1], len(lanes))
        keys = rows_at(latents.data, lanes[chosen[t, :count]]).to(wide)
        query = torch.cat((q[t], q_rotated[t]), 1).to(wide)
        shares = (query @ keys.t() * scale).softmax(1)
        out[t] = shares @ keys[:, : latents.rank]
    return out


BLOCKS = "attention to chosen blocks of keys"


@op(
    axes={"q": 0, "k": 0, "slots": 0},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for=BLOCKS,
)
def block_select(
    q: Tensor,
    k: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    plan: PlainPlan,
    *,
    size: int,
    top_k: int,
    local: int,
) -> Tensor:
    """Store the keys k [T, I] of the choice in slots [T] int64 (PAD_SLOT: nowhere), and choose for
    each new token and head of q [T, n, I] up to `top_k` blocks of `size` positions, of those that
    it sees -> their numbers [T, n, top_k] int64, ascending, then NO_TOKEN.

    The score of a block is the largest of its keys' products with the query; the last `local` ones
    that the token sees come before all others, and of equal ones the first is taken.
    """
    assert latents.keys is not None, "this layer's tokens have no keys for the choice"
    assert local <= top_k, "the blocks before a query are among those that it sees"
    store_rows(latents.keys, slots, k)
    wide = WIDE[q.dtype]
    chosen = torch.full((len(q), q.shape[1], top_k), NO_TOKEN, dtype=torch.int64, device=q.device)
    for t, lanes in seen_by_token(plan):
        scores = q[t].to(wide) @ rows_at(latents.keys, lanes).to(wide).t()
        # the last block may be shorter
        scores = F.pad(scores, (0, -len(lanes) % size), value=-math.inf)
        blocks = scores.unflatten(1, (-1, size)).amax(2)
        blocks[:, max(blocks.shape[1] - local, 0) :] = math.inf
        best = blocks.sort(descending=True, stable=True).indices[:, :top_k]
        chosen[t, :, : best.shape[1]] = best.sort().values
    return chosen


@op(
    axes={"q": 0, "k": 0, "v": 0, "chosen": 0, "slots": 0},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for=BLOCKS,
)
def block_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    plan: PlainPlan,
    *,
    scale: float,
    size: int,
) -> Tensor:
    """Store keys k and values v [T, K, D] of new tokens side by side in slots [T], and attend with
    q [T, H, D] to what each token sees of the blocks `chosen` [T, n, top_k] of `size` positions ->
    [T, H, D]. A choice is of H / n heads, keys and values are of H / K.
    """
    store_rows(latents.data, slots, torch.cat((k, v), 1).flatten(1))
    wide, out = WIDE[q.dtype], torch.empty_like(q)
    count = math.lcm(chosen.shape[1], k.shape[1])
    heads = q.shape[1] // count  # which have one choice, and keys and values of one head
    for t, lanes in seen_by_token(plan):
        for i in range(count):
            blocks = chosen[t, i * chosen.shape[1] // count]
            seen = (blocks[blocks >= 0, None] * size + _counted(size, q.device)).flatten()
            rows = rows_at(latents.data, lanes[seen[seen < len(lanes)]]).to(wide)
            keys, values = rows.view(-1, 2, *k.shape[1:])[:, :, i * k.shape[1] // count].unbind(1)
            own = slice(i * heads, (i + 1) * heads)
            shares = (q[t, own].to(wide) @ keys.t() * scale).softmax(1)
            out[t, own] = shares @ values
    return out


def _counted(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def store_rows(memory: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, W] into slots [T] of a memory [N, S, W]; PAD_SLOT: nowhere."""
    used = slots >= 0
    places, size = slots[used], memory.shape[1]
    memory.index_put_((places // size, places % size), rows[used])


def seen_by_token(plan: PlainPlan) -> Iterator[tuple[int, Tensor]]:
    """Each new token of a step, and the lanes of all that it sees by position."""
    for rows in plan.decode:
        lanes = rows.lanes.view(len(rows.spans), -1)
        tokens = rows.tokens
        if isinstance(tokens, slice):
            tokens = torch.arange(tokens.start, tokens.stop)
        for row, token in enumerate(tokens.tolist()):
            yield token, lanes[row, : int(rows.spans[row])]
    for part in plan.prefill:
        for tile in part.tiles:
            first = tile.keys.stop - (tile.tokens.stop - tile.tokens.start) + 1
            for i, token in enumerate(range(tile.tokens.start, tile.tokens.stop)):
                yield token, part.lanes[: first + i]


def rows_at(memory: Tensor, lanes: Tensor) -> Tensor:
    """The contents [M, W] of the slots lanes - 1 [M] of a memory [N, S, W]."""
    slots, size = lanes - 1, memory.shape[1]
    return memory[slots // size, slots % size]
