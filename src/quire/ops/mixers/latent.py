"""Multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1): planned as ordinary
attention is, over one latent per token that all heads share.

A query's part that meets the latent comes multiplied with its head's key weight (`heads_linear`),
and the result is a mean of latents, which the head's value weight turns into values. So memory is
read once for keys and values. This is the one form for any number of new tokens: the expanded form,
which multiplies every latent with both weights, rounds differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.attention_plan import DecodeRows, PlainPlan, PrefillRow, plan_rows
from quire.ops.kv import LayerLatents
from quire.ops.norm import NormWeight, norm
from quire.ops.registry import op
from quire.ops.rotary import RotaryTable, refuse_several_positions, rotate


class HeadsWeight(Protocol):
    """A packed weight per head, opaque to all but the provider that packed it."""

    @property
    def heads(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainHeads:
    """Plain torch's format: weight [H, out, in]."""

    weight: Tensor

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


@op(format="latent", only_for="latent attention")
def pack_heads(weight: Tensor) -> PlainHeads:
    """Take weight [H, out, in] into the provider's format, once at load. Its values are kept."""
    return PlainHeads(weight)


@op(axes={"x": 0}, format="latent", only_for="latent attention")
def heads_linear(x: Tensor, w: PlainHeads) -> Tensor:
    """x [T, H, in] times the weight of each head -> [T, H, out] in x's dtype."""
    return torch.bmm(x.transpose(0, 1), w.weight.transpose(1, 2)).transpose(0, 1)


@op(format="latent", only_for="latent attention")
def plan_latent(
    *, query_start: np.ndarray, seq_lens: np.ndarray, block_table: Tensor, block_size: int
) -> PlainPlan:
    """Prepare a step; the arguments are those of `plan_attention`."""
    return plan_rows(query_start, seq_lens, block_table, block_size, None)


@op(
    axes={"q": 0, "x": 0, "slots": 0, "positions": 1},
    mutates=("latents",),
    format="latent",
    only_for="latent attention",
)
def latent_store(
    q: Tensor,
    x: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    positions: Tensor,
    *,
    norm: NormWeight,
    rotary: RotaryTable | None,
) -> Tensor:
    """Store latents and rotate queries: q [T, H, R] and x [T, r + R] -> q rotated, [T, H, R].

    Of x, the first r values are normed and the last R rotated, then both are written to slots [T]
    int64 (PAD_SLOT: nowhere; no other slot twice). positions [1, T] int64; `rotary` rotates all R.
    Rounds as `rope_store` does.
    """
    refuse_several_positions(positions)
    stored = _finished(x, latents.rank, positions, norm, rotary)
    used = slots >= 0
    places, size = slots[used], latents.block_size
    latents.data.index_put_((places // size, places % size), stored[used])
    return q if rotary is None else rotate(q, positions[0], rotary)


def _finished(
    x: Tensor, rank: int, positions: Tensor, n: NormWeight, rotary: RotaryTable | None
) -> Tensor:
    key = x[:, None, rank:]
    if rotary is not None:
        key = rotate(key, positions[0], rotary)
    return torch.cat((norm(x[:, :rank], n), key[:, 0]), 1)


@op(axes={"q": 0, "q_rotated": 0}, format="latent", only_for="latent attention")
def latent_attend(
    q: Tensor, q_rotated: Tensor, latents: LayerLatents, plan: PlainPlan, scale: float
) -> Tensor:
    """Attention of q [T, H, r] and q_rotated [T, H, R] over the rows' latents -> [T, H, r].

    The score of a key is scale * (q . latent + q_rotated . rotated key), its value is the latent.
    Which keys a query sees: see `attend`.
    """
    queries = torch.cat((q, q_rotated), 2)
    out = torch.empty_like(q)
    for rows in plan.decode:
        out[rows.tokens] = _decode(queries[rows.tokens], latents, rows, scale)
    for row in plan.prefill:
        _prefill(out, queries, latents, row, plan, scale)
    return out


def _decode(q: Tensor, latents: LayerLatents, rows: DecodeRows, scale: float) -> Tensor:
    """q [R, H, W] of rows with one new token -> [R, H, r]; heads take the place of tokens."""
    num_rows = len(rows.spans)
    keys = _read(latents, rows.lanes).view(num_rows, 1, rows.span, -1)
    bias = rows.bias(q.dtype, slice(0, num_rows))
    y = F.scaled_dot_product_attention(
        q.unsqueeze(1), keys, keys[..., : latents.rank], attn_mask=bias, scale=scale
    )
    return y.squeeze(1)


def _prefill(
    out: Tensor, q: Tensor, latents: LayerLatents, row: PrefillRow, plan: PlainPlan, scale: float
) -> None:
    """Write one row's attention to its part of out [T, H, r]."""
    keys = _read(latents, row.lanes).unsqueeze(0)
    for tile in row.tiles:
        part = q[tile.tokens].transpose(0, 1)
        seen = keys[:, tile.keys].expand(len(part), -1, -1)
        bias = None if tile.is_causal else plan.tile_bias(tile, q.dtype)
        y = F.scaled_dot_product_attention(
            part,
            seen,
            seen[..., : latents.rank],
            attn_mask=bias,
            is_causal=tile.is_causal,
            scale=scale,
        )
        out[tile.tokens] = y.transpose(0, 1)


def _read(latents: LayerLatents, lanes: Tensor) -> Tensor:
    """The latents [M, r + R] of the slots lanes - 1 [M], zeros for lane 0."""
    slots = (lanes - 1).clamp(min=0)
    found = latents.data[slots // latents.block_size, slots % latents.block_size]
    return found.masked_fill((lanes == 0).unsqueeze(1), 0)
