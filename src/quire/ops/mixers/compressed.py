"""Attention to the last tokens and to compressed entries of all before (DeepSeek-V4, section 2.3).

Each token has one row, which is key and value of all heads, and what entries are made of: numbers
and gates. Every `rate` tokens, a piece, become an entry: the sum of their numbers, weighed by the
softmax of their gates, normed and rotated at the position of the first. Where pieces overlap a
token has two halves of both; an entry adds the first halves of the piece before to the second
halves of its own. Rows of tokens are needed for a while (`recent`); entries, and the keys by which
a query chooses some, stay.

All ops look at one new token at a time and at what it sees, in the order of positions: so no result
depends on how a row's tokens are cut into steps, nor on other rows. Sums are in fp32. The last
`rotary.dim` numbers of a head rotate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.attention_plan import PlainPlan
from quire.ops.kv import LayerLatents
from quire.ops.mixers.indexed import NO_TOKEN, rows_at, seen_by_token, store_rows
from quire.ops.norm import NormWeight, norm
from quire.ops.registry import WIDE, op
from quire.ops.rotary import RotaryTable, refuse_several_positions, rotate

_ENTRIES = "attention to compressed entries"


@dataclass(frozen=True, slots=True)
class Compressor:
    """Maker of entries of `rate` tokens each, of I numbers, where pieces overlap from 2 I of each
    token, else from I: these begin at number `first` of a token's row, their gates follow. `bias`
    [rate, 2 I or I] fp32 is that of the gates of a piece's tokens.
    """

    first: int
    rate: int
    overlaps: bool
    bias: Tensor
    norm: NormWeight
    rotary: RotaryTable


@op(
    axes={"q": 0, "key": 0, "rest": 0, "slots": 0, "positions": 1},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for=_ENTRIES,
)
def recent_store(
    q: Tensor,
    key: Tensor,
    rest: Tensor,
    latents: LayerLatents,
    slots: Tensor,
    positions: Tensor,
    *,
    rotary: RotaryTable,
) -> Tensor:
    """Rotate q [T, H, D] -> [T, H, D], and key [T, D]; write the key and `rest` [T, W - D] to slots
    [T] int64 (PAD_SLOT: nowhere; no other slot twice). positions [1, T] int64.
    """
    refuse_several_positions(positions)
    turned = _turned(key[:, None], positions[0], rotary)[:, 0]
    store_rows(latents.data, slots, torch.cat((turned, rest), 1))
    return _turned(q, positions[0], rotary)


@op(
    axes={"q": 0, "weights": 0, "slots": 0, "positions": 1},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for=_ENTRIES,
)
def entry_select(
    q: Tensor,
    weights: Tensor,
    recent: LayerLatents,
    plan: PlainPlan,
    latents: LayerLatents,
    slots: Tensor,
    entry_plan: PlainPlan,
    positions: Tensor,
    by: Compressor,
    top_k: int,
) -> Tensor:
    """Write the keys of the choice of entries that end with one of the new tokens, and choose for
    each new token up to `top_k` of the entries that it sees -> numbers of entries [T, top_k] int64,
    ascending, then NO_TOKEN. `latents` are the entries and their keys.

    The score of an entry is the sum over n heads of weights * relu(q . key) / sqrt(n I), of q [T,
    n, I], which is rotated, and weights [T, n]; of equal ones the first is taken. slots [T] int64:
    of the tokens in the memory of entries (PAD_SLOT: nowhere). positions [1, T] int64.
    """
    assert latents.keys is not None, "this layer's entries have no keys for the choice"
    _compress(recent, plan, latents.keys, slots, by)
    wide, (heads, dim) = WIDE[q.dtype], q.shape[1:]
    q = _turned(q, positions[0], by.rotary)
    chosen = torch.full((len(q), top_k), NO_TOKEN, dtype=torch.int64, device=q.device)
    for t, lanes in seen_by_token(entry_plan):
        keys = rows_at(latents.keys, _entry_lanes(lanes, by.rate)).to(wide)
        scores = (q[t].to(wide) @ keys.t()).relu() * dim**-0.5
        total = (weights[t].to(wide) * heads**-0.5) @ scores
        best = total.sort(descending=True, stable=True).indices[:top_k]
        chosen[t, : len(best)] = best.sort().values
    return chosen


@op(
    axes={"q": 0, "positions": 1, "slots": 0, "chosen": 0},
    mutates=("latents",),
    format="indexed",
    is_invariant=True,
    only_for=_ENTRIES,
)
def recent_attend(
    q: Tensor,
    sinks: Tensor,
    recent: LayerLatents,
    plan: PlainPlan,
    positions: Tensor,
    *,
    rotary: RotaryTable,
    window: int,
    scale: float,
    latents: LayerLatents | None = None,
    slots: Tensor | None = None,
    entry_plan: PlainPlan | None = None,
    by: Compressor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, D] over the rows of the last `window` tokens, and where there are
    entries over those that a token sees, `chosen` [T, k] of them or all -> [T, H, D], rotated back
    by the positions [1, T] int64 of the queries. `latents` are the entries.

    A row is key and value; sinks [H] are scores without a value. Entries that end with one of the
    new tokens are written first; slots [T] int64: of the tokens in the memory of entries (PAD_SLOT:
    nowhere).
    """
    wide, out, dim = WIDE[q.dtype], torch.empty_like(q), q.shape[2]
    far: dict[int, Tensor] = {}
    if latents is not None:
        assert slots is not None and entry_plan is not None and by is not None, "all of them"
        _compress(recent, plan, latents.data, slots, by)
        far = {t: _entry_lanes(lanes, by.rate) for t, lanes in seen_by_token(entry_plan)}
    for t, lanes in seen_by_token(plan):
        rows = rows_at(recent.data, lanes[-window:])[:, :dim]
        if latents is not None:
            seen = far[t] if chosen is None else far[t][chosen[t][chosen[t] >= 0]]
            rows = torch.cat((rows, rows_at(latents.data, seen)))
        keys = rows.to(wide)
        scores = torch.cat((q[t].to(wide) @ keys.t() * scale, sinks[:, None].to(wide)), 1)
        out[t] = scores.softmax(1)[:, :-1] @ keys
    # rotated keys are the values, too: turned back, their sum depends on relative positions alone
    return _turned(out, positions[0], rotary, back=True)


def _compress(
    recent: LayerLatents, plan: PlainPlan, memory: Tensor, slots: Tensor, by: Compressor
) -> None:
    """Write the entry [I] of each piece that one of the new tokens ends into `memory` [N, S, I]."""
    for t, lanes in seen_by_token(plan):
        if len(lanes) % by.rate:
            continue
        tokens = rows_at(recent.data, lanes[-2 * by.rate if by.overlaps else -by.rate :])
        entry = norm(_entry(tokens, memory.shape[2], by), by.norm)
        first = torch.tensor([len(lanes) - by.rate], device=lanes.device)
        turned = _turned(entry[None, None], first, by.rotary)[0]
        own = slots[t : t + 1].div(by.rate, rounding_mode="floor")
        store_rows(memory, own, turned)


def _entry(tokens: Tensor, width: int, by: Compressor) -> Tensor:
    """The weighed sum [I] of rows [rate or 2 rate, W] of tokens."""
    parts = 1 + by.overlaps
    own = tokens[:, by.first : by.first + 2 * parts * width].to(WIDE[tokens.dtype])
    numbers, gates = own.unflatten(1, (2, parts, width)).unbind(1)  # [n, parts, I] each
    bias = by.bias.to(gates.dtype).unflatten(1, (parts, width))
    pieces = [
        (
            numbers[start : start + by.rate, part],
            gates[start : start + by.rate, part] + bias[:, part],
        )
        for part, start in enumerate(range(0, len(tokens), by.rate), parts - len(tokens) // by.rate)
    ]
    weights = torch.cat([gate for _, gate in pieces]).softmax(0)
    return (torch.cat([number for number, _ in pieces]) * weights).sum(0).to(tokens.dtype)


def _entry_lanes(lanes: Tensor, rate: int) -> Tensor:
    """The lanes of the entries of whole pieces, from those of their tokens in the same memory."""
    return lanes[rate - 1 :: rate].sub(1).div(rate, rounding_mode="floor") + 1


def _turned(x: Tensor, positions: Tensor, table: RotaryTable, *, back: bool = False) -> Tensor:
    """x [T, N, D] with the last numbers of each head rotated, or rotated back."""
    if back:
        cos, sin = table.cos_sin.index_select(0, positions).chunk(2, 1)
        table = replace(table, cos_sin=torch.cat((cos, -sin), 1))
        positions = torch.arange(len(x), device=x.device)
    first = x.shape[2] - table.dim
    return torch.cat((x[..., :first], rotate(x[..., first:], positions, table)), -1)
