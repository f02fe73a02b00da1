"""Bounds of the ops of attention to recent tokens and compressed entries; see op_bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.attention import AttentionArgs
from quire.ops.kv import LayerLatents
from quire.ops.mixers.compressed import Compressor
from quire.ops.rotary import RotaryTable
from tests.support import op_bounds
from tests.support.compressed import oracle
from tests.support.op_oracle_rows import Array, to_array
from tests.support.running_error import Approx, Stored, join, softmax

exact = Approx.exact


def _turned(stored: Stored, x: Approx, table: RotaryTable, positions: Any) -> Approx:
    """x [T, N, D] with the last numbers of each head rotated."""
    first = x.value.shape[2] - table.dim
    last = op_bounds._turned(stored, x[..., first:], table, torch.as_tensor(positions))
    value = np.concatenate((x.value[..., :first], last.value), 2)
    return Approx(value, np.concatenate((x.error[..., :first], last.error), 2))


def recent_store(stored, q, key, rest, latents, slots, positions, *, rotary) -> dict[str, Approx]:
    keys = _turned(stored, exact(key[:, None]), rotary, positions[0])
    error = np.zeros(tuple(latents.data.shape))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            error[(*divmod(slot, latents.block_size), slice(key.shape[1]))] = keys.error[token, 0]
    queries = _turned(stored, exact(q), rotary, positions[0])
    return {"0": queries, "latents": Approx(to_array(latents.data), error)}


def _entry_errors(
    stored: Stored,
    recent: LayerLatents,
    plan: Any,
    memory: Tensor,
    slots: Tensor,
    by: Compressor,
) -> Array:
    """Of a memory [N, S, I], whose new entries alone have some."""
    rows, width = to_array(recent.data).reshape(-1, recent.width), memory.shape[2]
    error = np.zeros(tuple(memory.shape))
    for tokens, first, own in oracle.pieces(by, plan, slots):
        numbers, gates = oracle.terms(by, rows[tokens], width)
        added = Approx(gates.T, np.abs(gates.T))
        total = stored((exact(numbers.T) * softmax(added)).sum()).reshape(1, width)
        entry = op_bounds._normed(stored, total, by.norm).reshape(1, 1, width)
        error[divmod(own, memory.shape[1])] = _turned(stored, entry, by.rotary, [first]).error[0, 0]
    return error


def _latents(latents: LayerLatents, errors: Array, *, of_keys: bool) -> Approx:
    values = [to_array(part) for part in latents.parts]
    found = [np.zeros_like(value) for value in values]
    found[of_keys] = errors
    return Approx(np.concatenate(values, 2), np.concatenate(found, 2))


def entry_select(
    stored, q, weights, recent, plan, latents, slots, entry_plan, positions, by, top_k
) -> dict[str, Approx]:
    assert latents.keys is not None
    errors = _entry_errors(stored, recent, plan, latents.keys, slots, by)
    return {"latents": _latents(latents, errors, of_keys=True)}


def recent_attend(
    stored, q, sinks, recent, plan, positions, *, rotary, window, scale, **entries
) -> dict[str, Approx]:
    found: dict[str, Approx] = {}
    near, far = np.zeros(tuple(recent.data.shape)), None
    if (latents := entries.get("latents")) is not None:
        far = _entry_errors(stored, recent, plan, latents.data, entries["slots"], entries["by"])
        found["latents"] = _latents(latents, far, of_keys=False)
    args, rows = AttentionArgs(scale, sinks=sinks), []
    for token in range(len(q)):
        step = (token, q, recent, plan, window)
        value = oracle.keys_of(*step, **entries)
        error = oracle.keys_of(*step, near, far, **entries)
        heads = np.repeat(value[:, None], q.shape[1], 1), np.repeat(error[:, None], q.shape[1], 1)
        keys = Approx(*heads)
        one = op_bounds._attend_to(stored, exact(q[token]), keys, keys, np.zeros(len(value)), args)
        rows.append(one)
    means = stored(join(rows, q.shape[1] * q.shape[2])).reshape(*q.shape)
    half = rotary.dim // 2
    back = torch.cat((rotary.cos_sin[:, :half], -rotary.cos_sin[:, half:]), 1)
    table = replace(rotary, cos_sin=back)
    return found | {"0": _turned(stored, means, table, positions[0])}
