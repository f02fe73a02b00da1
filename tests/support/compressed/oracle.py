"""The oracle of attention to recent tokens and compressed entries: a token, a head, an entry at a
time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.kv import LayerLatents
from quire.ops.mixers.compressed import Compressor
from quire.ops.rotary import RotaryTable
from tests.support.op_oracle_rows import Array, norm_array, stack, to_array, to_tensor


def turned(x: Array, table: RotaryTable, position: int, sign: float = 1.0) -> Array:
    """One head x [D], whose last numbers rotate."""
    y, half, first = x.copy(), table.dim // 2, len(x) - table.dim
    row = to_array(table.cos_sin[position])
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if table.interleaved else (i, i + half)
        a, b, cos, sin = first + a, first + b, row[i], sign * row[half + i]
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


def recent_store(q, key, rest, latents, slots, positions, *, rotary) -> Tensor:
    queries = []
    for token, slot in enumerate(slots.tolist()):
        at = int(positions[0, token])
        queries.append([turned(head, rotary, at) for head in to_array(q[token])])
        whole = np.concatenate((turned(to_array(key[token]), rotary, at), to_array(rest[token])))
        if slot >= 0:
            latents.data[divmod(slot, latents.block_size)] = torch.from_numpy(whole)
    return to_tensor(stack(queries, *q.shape[1:]))


def terms(by: Compressor, tokens: Array, width: int) -> tuple[Array, Array]:
    """The numbers and gates [n, I] of an entry, from the rows [m, W] of its tokens."""
    parts, bias = 1 + by.overlaps, to_array(by.bias)
    numbers, gates = [], []
    for i, row in enumerate(tokens):
        place = len(tokens) - i - 1  # from the last
        part = parts - 1 - place // by.rate
        in_piece = by.rate - 1 - place % by.rate
        start = by.first + part * width
        numbers.append(row[start : start + width])
        gates.append(
            row[start + parts * width : start + (parts + 1) * width]
            + bias[in_piece, part * width : (part + 1) * width]
        )
    return np.array(numbers), np.array(gates)


def pieces(by: Compressor, plan: Any, slots: Tensor) -> list[tuple[list[int], int, int]]:
    """Of each entry that a step makes: the slots of its tokens, the position of its first, and its
    own slot.
    """
    found = []
    for token, (_, seen) in enumerate(plan.seen):
        if len(seen) % by.rate == 0:
            first = max(len(seen) - by.rate * (1 + by.overlaps), 0)
            own = int(slots[token]) // by.rate
            found.append((list(seen[first:]), len(seen) - by.rate, own))
    return found


def compress(
    recent: LayerLatents, plan: Any, memory: Tensor, slots: Tensor, by: Compressor
) -> None:
    """Write the entries that a step makes."""
    rows, width = to_array(recent.data).reshape(-1, recent.width), memory.shape[2]
    for tokens, first, own in pieces(by, plan, slots):
        numbers, gates = terms(by, rows[tokens], width)
        entry = np.empty(width)
        for i in range(width):
            powers = [math.exp(gate) for gate in gates[:, i]]
            shares = [power / sum(powers) for power in powers]
            entry[i] = sum(s * n for s, n in zip(shares, numbers[:, i], strict=True))
        entry = turned(norm_array(entry, by.norm), by.rotary, first)
        memory[divmod(own, memory.shape[1])] = torch.from_numpy(entry).to(memory.dtype)


def entry_slots(seen: Any, rate: int) -> list[int]:
    """Of entries, from the slots of tokens in their memory."""
    return [int(slot) // rate for slot in list(seen)[rate - 1 :: rate]]


def entry_select(
    q, weights, recent, plan, latents, slots, entry_plan, positions, by, top_k
) -> Tensor:
    """Write keys, then score every entry that a token sees by itself."""
    assert latents.keys is not None
    compress(recent, plan, latents.keys, slots, by)
    memory, (heads, dim) = to_array(latents.keys).reshape(-1, latents.keys.shape[2]), q.shape[1:]
    found = np.full((len(q), top_k), -1, dtype=np.int64)
    for token, (_, seen) in enumerate(entry_plan.seen):
        queries = [turned(h, by.rotary, int(positions[0, token])) for h in to_array(q[token])]
        scores = []
        for slot in entry_slots(seen, by.rate):
            products = [max(float(memory[slot] @ h), 0.0) / math.sqrt(dim) for h in queries]
            shares = to_array(weights[token]) / math.sqrt(heads)
            scores.append(float(np.dot(shares, products)))
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]  # noqa: B023
        found[token, : len(best)] = sorted(best)
    return torch.from_numpy(found)


def recent_attend(q, sinks, recent, plan, positions, *, rotary, window, scale, **entries) -> Tensor:
    if entries.get("latents") is not None:
        compress(recent, plan, entries["latents"].data, entries["slots"], entries["by"])
    rows = []
    for token in range(len(q)):
        keys = keys_of(token, q, recent, plan, window, **entries)
        for h, head in enumerate(to_array(q[token])):
            scores = [*(scale * (keys @ head)), float(sinks[h])]
            powers = np.exp(np.array(scores) - max(scores))
            mean = powers[:-1] @ keys / powers.sum()
            rows.append(turned(mean, rotary, int(positions[0, token]), -1.0))
    return to_tensor(np.array(rows, dtype=np.float64).reshape(q.shape))


def keys_of(
    token: int,
    q: Tensor,
    recent: LayerLatents,
    plan: Any,
    window: int,
    of_recent: Array | None = None,
    of_entries: Array | None = None,
    *,
    latents: LayerLatents | None = None,
    entry_plan: Any = None,
    by: Compressor | None = None,
    chosen: Tensor | None = None,
    **_: Any,
) -> Array:
    """What a token sees [L, D], recent tokens, then entries; or the same rows of other arrays."""
    dim = q.shape[2]
    rows = to_array(recent.data) if of_recent is None else of_recent
    near = list(plan.seen[token][1])[-window:]
    found = rows.reshape(-1, recent.width)[near, :dim]
    if latents is None or by is None:
        return found
    far = entry_slots(entry_plan.seen[token][1], by.rate)
    if chosen is not None:
        far = [far[i] for i in chosen[token].tolist() if i >= 0]
    entries = to_array(latents.data) if of_entries is None else of_entries
    return np.concatenate((found, entries.reshape(-1, dim)[far]))
