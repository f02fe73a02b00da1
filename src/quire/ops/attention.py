"""Causal attention over paged KV: planned once a step on the host, run in every layer.

Plain torch gathers the lanes that a row may attend to and passes them to
scaled_dot_product_attention. Rows with one new token are batched, padded to the longest; rows with
more go one at a time, in tiles of queries. What a plan prepares (gather indices, masks) serves all
layers of a KV group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.attention_plan import DecodeRows, PlainPlan, PrefillRow, Tile, plan_rows
from quire.ops.kv import PlainKV
from quire.ops.registry import WIDE, op
from quire.ops.step_rows import StepRows

MAX_SCORES = 1 << 24
"""Scores that the written-out softmax holds at once (64 MiB in fp32); longer tiles are cut."""


GATHER_BYTES = 8 << 20
"""KV that rows with one new token gather at once, where one row needs no more. Memory for larger
gathers comes fresh from the system each time: 32 rows of 160 tokens of a 0.6B model took 1.6 times
as long in one piece (21 MB)."""


class AttentionPlan(Protocol):
    """A provider's preparation of one step for one KV group; valid until a block table changes."""

    @property
    def window(self) -> int | None:
        """As `plan_attention` takes it."""

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """New tokens and tokens of each row, [R] integers on the host."""

    def refill(self, step: StepRows) -> AttentionPlan:
        """The plan of another step with the same block size and window: this one, changed in place,
        or a new one.

        The arrays must stay as they are until the step is over. Where the next step has the same
        arrays with new contents, refilling costs the providers that read them in place nothing.
        """


@runtime_checkable
class SpanPlan(Protocol):
    """A plan of a provider that has spans: new tokens of a row that see each other both ways."""

    def refill_spans(self, step: StepRows, whole: np.ndarray) -> AttentionPlan:
        """As `AttentionPlan.refill`, with whole [R] int32. The new tokens of a row see those after
        them, too, where its entry is 1, and where it is 2 all of them, however short the window is.
        """


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """One layer's facts: score = scale * q.k, softcap * tanh(score / softcap), + alibi * (j - i),
    softmax with sinks.

    sinks [H] join the softmax as one more score per head, without a value (gpt-oss); alibi [H] are
    the slopes (Press et al. 2021). `window` is the number of keys a query sees, itself included,
    and must be the plan's.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether the scores must be written out, since a fused kernel cannot change them."""
        return self.softcap is not None or self.sinks is not None or self.alibi is not None


@op(format="kv")
def plan_attention(
    *,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    block_table: Tensor,
    block_size: int,
    window: int | None,
    kv_heads: int | None = None,
) -> PlainPlan:
    """Prepare a step: query_start [R+1] and seq_lens [R] (new tokens included) int32 on the host.

    block_table [R, B] int32, entry b of a row holds its tokens b*S .. (b+1)*S-1. Entries before the
    window and beyond the length are never used and may hold anything. The table is read now: later
    changes to it do not reach the plan. kv_heads: the fewest of a layer that the plan is for, where
    a provider divides work by it; None: unknown. Any plan serves layers with any number of them.
    """
    return plan_rows(query_start, seq_lens, block_table, block_size, window)


@op(axes={"q": 0}, format="kv")
def attend(q: Tensor, kv: PlainKV, plan: PlainPlan, args: AttentionArgs) -> Tensor:
    """Attention of q [T, H, D] over the rows' keys and values in `kv` -> [T, H*D] in q's dtype.

    Query i of a row with n new tokens is at position p = seq_len - n + i and attends to the keys j
    <= p, j > p - window. Keys and values always come from the cache, where `rope_store` has put
    those of this step already. Those of memory with scales are widened to fp32, which everything
    else is in then.
    """
    assert args.window == plan.window, "the plan was made for another window"
    if kv.scales is not None:
        # numbers times scales are not values of the model's dtype, and are not rounded to it
        return _attend(q.to(WIDE[q.dtype]), kv, plan, args).to(q.dtype)
    return _attend(q, kv, plan, args)


def _attend(q: Tensor, kv: PlainKV, plan: PlainPlan, args: AttentionArgs) -> Tensor:
    if len(plan.decode) == 1 and not plan.prefill:
        return _decode(q, kv, plan.decode[0], args)
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for rows in plan.decode:
        out[rows.tokens] = _decode(q[rows.tokens], kv, rows, args)
    for row in plan.prefill:
        _prefill(out, q, kv, row, plan, args)
    return out


def _decode(q: Tensor, kv: PlainKV, rows: DecodeRows, args: AttentionArgs) -> Tensor:
    """q [R, H, D] of rows with one new token -> [R, H*D], as many rows at a time as are cheap."""
    num_rows = q.shape[0]
    lane_bytes = 2 * kv.kv_heads * kv.head_dim * q.element_size()
    size = max(1, GATHER_BYTES // (rows.span * lane_bytes))
    if size >= num_rows:
        return _decode_piece(q, kv, rows, slice(0, num_rows), args)
    starts = range(0, num_rows, size)
    pieces = [slice(start, min(start + size, num_rows)) for start in starts]
    return torch.cat([_decode_piece(q[piece], kv, rows, piece, args) for piece in pieces])


def _decode_piece(
    q: Tensor, kv: PlainKV, rows: DecodeRows, piece: slice, args: AttentionArgs
) -> Tensor:
    """q [n, H, D] of some of the rows -> [n, H*D]; a KV head's queries take the place of tokens."""
    num_rows, heads, head_dim = q.shape
    span = rows.span
    lanes = kv.read(rows.lanes[piece.start * span : piece.stop * span], q.dtype)
    # [n, K, L, D] each
    k, v = lanes.view(num_rows, -1, 2, kv.kv_heads, head_dim).transpose(1, 3).unbind(2)
    q = q.view(num_rows, kv.kv_heads, -1, head_dim)
    if args.needs_scores:
        bias, distance = rows.bias(WIDE[q.dtype], piece), rows.distance[piece]
        y = _written_out(q, k, v, bias, distance, args, per_head=(1, kv.kv_heads, -1, 1))
    else:
        bias = rows.bias(q.dtype, piece)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=args.scale)
    return y.reshape(num_rows, heads * head_dim)


def _prefill(
    out: Tensor, q: Tensor, kv: PlainKV, row: PrefillRow, plan: PlainPlan, args: AttentionArgs
) -> None:
    """Write one row's attention to its part of out [T, H*D]."""
    _, heads, head_dim = q.shape
    kv_heads = kv.kv_heads
    lanes = kv.read(row.lanes, q.dtype)
    # heads as [K, G]: all queries of a KV head read the same keys through a stride of 0
    k, v = (t.transpose(0, 1).unsqueeze(1) for t in lanes.unbind(1))  # [K, 1, L, D]
    shape = (kv_heads, heads // kv_heads, -1, -1)
    for tile in row.tiles:
        start, stop = tile.tokens.start, tile.tokens.stop
        part = q[start:stop].view(-1, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        keys, values = k[:, :, tile.keys], v[:, :, tile.keys]
        if args.needs_scores:
            y = _tile_written_out(part, keys, values, plan, tile, args)
        else:
            bias = None if tile.is_causal else plan.tile_bias(tile, q.dtype)
            y = F.scaled_dot_product_attention(
                part,
                keys.expand(shape),
                values.expand(shape),
                attn_mask=bias,
                is_causal=tile.is_causal,
                scale=args.scale,
            )
        out[start:stop].view(-1, kv_heads, heads // kv_heads, head_dim).copy_(y.permute(2, 0, 1, 3))


def _tile_written_out(
    q: Tensor, k: Tensor, v: Tensor, plan: PlainPlan, tile: Tile, args: AttentionArgs
) -> Tensor:
    """q [K, G, n, D], k and v [K, 1, L, D] -> [K, G, n, D], cut into pieces of at most MAX_SCORES
    scores.
    """
    kv_heads, per_kv, num_queries, _ = q.shape
    num_keys = k.shape[2]
    size = max(1, MAX_SCORES // (kv_heads * per_kv * num_keys))
    bias = plan.tile_bias(tile, WIDE[q.dtype])
    distance = plan.tile_distance(tile)
    pieces = [
        _written_out(
            q[:, :, a : a + size],
            k,
            v,
            bias[a : a + size],
            distance[a : a + size],
            args,
            (kv_heads, per_kv, 1, 1),
        )
        for a in range(0, num_queries, size)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    distance: Tensor,
    args: AttentionArgs,
    per_head: tuple[int, ...],
) -> Tensor:
    """Attention with the scores in memory, in fp32: q [X, Y, M, D], k and v [X, Y or 1, L, D] ->
    [X, Y, M, D].

    `per_head` is the shape in which one value per head meets the scores [X, Y, M, L].
    """
    wide = WIDE[q.dtype]
    k, v = k.to(wide), v.to(wide)
    scores = _product(q.to(wide) * args.scale, k.transpose(2, 3))
    if args.softcap is not None:
        scores = scores.div_(args.softcap).tanh_().mul_(args.softcap)
    if args.alibi is not None:
        scores = scores.add_(args.alibi.to(wide).view(per_head) * distance)
    if bias is not None:
        scores = scores.add_(bias)
    if args.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = args.sinks.to(wide).view(per_head).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return _product(weights, v).to(q.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [X, Y, M, J] times b [X, Y, J, P]; where b has Y = 1, the queries of all Y share it in one
    larger product.
    """
    if b.shape[1] == a.shape[1]:
        return a @ b
    x, y, m, j = a.shape
    return (a.reshape(x, y * m, j) @ b.squeeze(1)).view(x, y, m, -1)
