"""How far a result of each op may be from the oracle's, entry by entry: functions named as the ops,
from the oracle's arguments to what the op makes of them. A result that is missing must be exact.

A bound follows from the op's definition, the dtype, the lengths of its sums and the numbers of the
case. Nothing of it is measured, so that a verdict on one machine holds on all. It is a running
error analysis (`running_error`) of the op as written here, in which sums and functions are computed
in float32 and the result of every other step may be rounded to the dtype. An op that only chooses,
moves or copies must give the oracle's result exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from quire.ops import AttentionArgs, LayerLatents, MoeArgs, NormWeight, RotaryTable, RouteArgs
from quire.ops.mixers.pooling import SPAN
from quire.ops.segments import Addend
from tests.support import op_oracle_rows
from tests.support.lora.op_oracle_lora import OracleAddend, OracleBank
from tests.support.op_oracle_paged import (
    IN_BYTES,
    NO_DISTANCES,
    OracleKV,
    chosen_slots,
    export_kv,
    relative_columns,
)
from tests.support.op_oracle_rows import Array, OracleLinear, choose, expert_slot, near, to_array
from tests.support.running_error import (
    FUNCTION,
    Approx,
    Stored,
    contract,
    exp,
    join,
    log,
    sigmoid,
    softmax,
    sqrt,
    tanh,
)
from tests.support.streams import bounds as streams_bounds

exact = Approx.exact

# norms, sums, gates


def _normed(stored: Stored, x: Approx, n: NormWeight) -> Approx:
    centred = x if n.kind.startswith("rms") else x - x.mean()
    y = stored(centred / sqrt((centred * centred).mean() + n.eps))
    if n.weight is not None:
        y = y * (stored(exact(n.weight) + 1.0) if n.kind.endswith("1p") else exact(n.weight))
    return stored(y if n.bias is None else stored(y) + exact(n.bias))


def norm(stored, x, n) -> dict[str, Approx]:
    return {"0": _normed(stored, exact(x), n)}


def _sum(stored: Stored, x: Tensor, delta: Tensor, scale: float = 1.0) -> Approx:
    return stored(exact(x) + (exact(delta) if scale == 1.0 else stored(exact(delta) * scale)))


def add(stored, **arguments) -> dict[str, Approx]:
    return {"0": _sum(stored, **arguments)}


def add_norm(stored, n, **arguments) -> dict[str, Approx]:
    total = _sum(stored, **arguments)
    return {"0": total, "1": _normed(stored, total, n)}


def multiply(stored, x, factors) -> dict[str, Approx]:
    return {"0": stored(exact(x) * exact(factors))}


def scale_gate(stored, y, gate) -> dict[str, Approx]:
    return {"0": stored(exact(y) * stored(sigmoid(exact(gate))))}


def scale_heads(stored, y, gate) -> dict[str, Approx]:
    opened = stored(sigmoid(exact(gate)))
    width = y.shape[1] // gate.shape[1]
    each = Approx(np.repeat(opened.value, width, 1), np.repeat(opened.error, width, 1))
    return {"0": stored(exact(y) * each)}


def scale_queries(stored, q, positions, factors) -> dict[str, Approx]:
    found = exact(to_array(factors)[positions[0].numpy()][:, None, None])
    return {"0": stored(exact(q) * found)}


def xielu(stored, x, numbers) -> dict[str, Approx]:
    y, (p, n, beta, eps) = exact(x), exact(numbers)
    powers = exp(Approx(np.minimum(y.value, eps.value), y.error))
    below = (powers + -1.0 - y) * (beta + log(exp(n) + 1.0))
    above = log(exp(p) + 1.0) * y * y
    branch = Approx(
        np.where(y.value > 0, above.value, below.value),
        np.where(y.value > 0, above.error, below.error),
    )
    return {"0": stored(branch + beta * y)}


# embeddings


def embed(stored, ids, table, scale=1.0, positions=None, position_table=None) -> dict[str, Approx]:
    x = exact(to_array(table)[ids.numpy()])
    x = x if scale == 1.0 else stored(x * scale)
    if positions is not None:
        x = stored(x + exact(to_array(position_table)[positions.numpy()]))
    return {"0": x}


def embed_packed(stored, ids, w, scale=1.0) -> dict[str, Approx]:
    return embed(stored, ids, w.weight, scale)  # type: ignore[arg-type]


def lora_embed(stored, x, ids, bank, slots, scale=1.0) -> dict[str, Approx]:
    chosen = np.zeros((len(x), bank.shape.in_features))
    chosen[np.arange(len(x)), ids.numpy()] = scale
    return {"0": stored(exact(x) + OracleAddend(chosen, bank, slots.tolist()).approx())}


# products with weights


def _product(stored: Stored, x: Approx, w: OracleLinear, addend: Addend | None = None) -> Approx:
    y = stored(contract("ti,oi->to", x, exact(w.weight), w.in_features))
    y = y if w.bias is None else stored(y + exact(w.bias))
    return y if addend is None else stored(_with(y, addend))


def _activation(x: Approx, act: str) -> Approx:
    """No activation is steeper than 1.13, but the square; they are exact for what is near 0."""
    if act.startswith("relu"):
        y = Approx(np.maximum(x.value, 0.0), x.error)
        return y * y if act == "relu2" else y
    return Approx(_SMOOTH[act](x.value), 1.13 * x.error + FUNCTION * x.size)


_SMOOTH: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: torch.nn.functional.gelu(torch.from_numpy(x)).numpy(),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def _gated(stored: Stored, h: Approx, act: str) -> Approx:
    half = h.value.shape[1] // 2
    return stored(stored(_activation(h[:, :half], act)) * h[:, half:])


def _gated_with_limit(stored: Stored, h: Approx, limit: float) -> Approx:
    half = h.value.shape[1] // 2
    gate = stored(Approx(np.minimum(h.value[:, :half], limit), h.error[:, :half]))
    up = stored(Approx(np.clip(h.value[:, half:], -limit, limit), h.error[:, half:]))
    opened = stored(gate * stored(sigmoid(stored(gate * 1.702))))
    return stored(stored(up + 1.0) * opened)


def linear(stored, x, w, addend=None) -> dict[str, Approx]:
    return {"0": _product(stored, exact(x), w, addend)}


def modulate(stored, x, by, act) -> dict[str, Approx]:
    return {"0": stored(stored(_activation(exact(x), act)) * exact(by))}


def _bounded(stored: Stored, h: Approx, act: str, bound: float) -> Approx:
    half = h.value.shape[1] // 2
    gate = stored(_activation(h[:, :half], act))
    gate = Approx(np.minimum(gate.value, bound), gate.error)
    return stored(gate * Approx(np.clip(h.value[:, half:], -bound, bound), h.error[:, half:]))


def clamped_gated(stored, gate_up, limit) -> dict[str, Approx]:
    return {"0": stored(_gated_with_limit(stored, exact(gate_up), limit))}


def bounded_gated(stored, gate_up, act, bound) -> dict[str, Approx]:
    return {"0": stored(_bounded(stored, exact(gate_up), act, bound))}


def sparse_gated(stored, gate_up, act, deviations) -> dict[str, Approx]:
    h, half = exact(gate_up), gate_up.shape[1] // 2
    gate = h[:, :half]
    mean, deviation = streams_bounds.moments(gate)
    sparse = gate - (mean + deviation * deviations)
    sparse = stored(Approx(np.maximum(sparse.value, 0.0), sparse.error))
    return {"0": stored(stored(_activation(sparse, act)) * h[:, half:])}


def hidden(stored, x, up, act, gated, addend=None) -> dict[str, Approx]:
    h = _product(stored, exact(x), up, addend)
    return {"0": _gated(stored, h, act) if gated else stored(_activation(h, act))}


def logits(stored, x, head, scale=1.0, softcap=None, addend=None) -> dict[str, Approx]:
    y = _product(stored, exact(x), head, addend) * scale
    return {"0": y if softcap is None else tanh(y / softcap) * softcap}


def linear_partial(stored, x, w, peaks=None) -> dict[str, Approx]:
    rows, weight = exact(to_array(x)), exact(w.weight)
    return {"0": contract("ti,oi->to", rows, weight, w.in_features)}


def linear_total(stored, parts, w, peaks, dtype, addend=None) -> dict[str, Approx]:
    sums = [exact(part) for part in parts.unbind(1)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[0::2], sums[1::2], strict=True)]
    return {"0": stored(_with(sums[0] if w.bias is None else sums[0] + exact(w.bias), addend))}


def _with(y: Approx, addend: Addend | OracleAddend | None) -> Approx:
    if addend is None:
        return y
    if isinstance(addend, OracleAddend):
        return y + addend.approx()
    values = np.zeros(y.value.shape)
    for t, row in enumerate(addend.rows.tolist()):
        values[t] = to_array(addend.values)[row] if row >= 0 else 0
    return y + exact(values)


def route(stored, logits, args, select_bias=None, expert_scales=None) -> dict[str, Approx]:
    bias = None if select_bias is None else to_array(select_bias)
    rows = exact(logits)
    found = [_weights(rows[t], args, bias).reshape(1, -1) for t in range(len(logits))]
    if expert_scales is not None:
        chosen = [[e for e, _ in choose(row, args, bias)] for row in rows.value]
        found = [w * exact(expert_scales)[e] for w, e in zip(found, chosen, strict=True)]
    return {"1": join(found, args.top_k)}


def route_softplus(
    stored, logits, top_k, scale, select_bias=None, ids=None, table=None
) -> dict[str, Approx]:
    chosen, _ = op_oracle_rows.route_softplus(logits, top_k, scale, select_bias, ids, table)
    rows, found = exact(logits), []
    for t, experts in enumerate(chosen.tolist()):
        scores = sqrt(log(exp(rows[t]) + 1.0))[experts]
        found.append((scores / scores.sum() * scale).reshape(1, -1))
    return {"1": join(found, top_k)}


def _weights(logits: Approx, args: RouteArgs, select_bias: Array | None) -> Approx:
    """Of a token's chosen experts, from its logits [E]."""
    chosen = [expert for expert, _ in choose(logits.value, args, select_bias)]
    if args.score == "sparsemixer":
        rivals = [near(list(logits.value), chosen[:i], args.jitter) for i in range(len(chosen))]
        return join([softmax(logits[r])[:1].reshape(1, 1) for r in rivals], 1) * args.scale
    if args.score == "softmax_topk":
        return softmax(logits[chosen]) * args.scale
    if args.score == "sigmoid_topk":
        return sigmoid(logits[chosen]) * args.scale
    scores = (softmax if args.score == "softmax" else sigmoid)(logits)[chosen]
    if not args.renorm:
        return scores * args.scale
    total = scores.sum() + args.renorm_eps
    return scores / Approx(np.maximum(total.value, args.renorm_min), total.error) * args.scale


def moe(stored, x, chosen, weights, experts, args, adapters=None) -> dict[str, Approx]:
    rows, shares = exact(x), exact(weights)

    def part(token: int, choice: int) -> Approx:
        row, share = rows[token : token + 1], shares[token, choice : choice + 1]
        index = int(chosen[token, choice])
        slot, pair = expert_slot(adapters, token, index), experts.pairs[index]
        banks = (adapters.up, adapters.down, slot) if slot >= 0 else None
        if args.weighs_input:
            return _expert(stored, stored(row * share), *pair, args, banks)
        return _expert(stored, row, *pair, args, banks) * share

    def one(token: int) -> Approx:
        total = part(token, 0)
        for choice in range(1, chosen.shape[1]):
            total = total + part(token, choice)
        return total

    return {"0": stored(join([one(token) for token in range(len(x))], x.shape[1]))}


def _expert(
    stored: Stored,
    x: Approx,
    up: OracleLinear,
    down: OracleLinear,
    args: MoeArgs,
    banks: tuple[OracleBank, OracleBank, int] | None = None,
) -> Approx:
    h = _product(stored, x, up)
    if banks is not None:
        h = stored(h + banks[0].approx(banks[2], x))
    if args.clamp is not None:
        h = _gated_with_limit(stored, h, args.clamp)
    elif args.bound is not None:
        h = _bounded(stored, h, args.act, args.bound)
    else:
        h = _gated(stored, h, args.act) if args.gated else stored(_activation(h, args.act))
    y = _product(stored, h, down)
    return y if banks is None else stored(y + banks[1].approx(banks[2], h))


# KV memory and attention


def _in_memory(kv: OracleKV, error: Array) -> dict[str, Approx]:
    """What the memory holds, as `export_kv` gives it, with the error [N, 2, S, K, D]."""
    return {"kv": Approx(to_array(export_kv(kv, range(kv.num_blocks))), error)}


def _no_error(kv: OracleKV) -> Array:
    return np.zeros((kv.num_blocks, 2, kv.block_size, kv.kv_heads, kv.head_dim))


def _held(stored: Stored, x: Approx, dtype: torch.dtype) -> Array:
    """Errors of vectors x [*, D] in memory of type dtype. With scales, a number that lies between
    two of the type may become either.
    """
    if dtype not in IN_BYTES:
        return x.error
    largest, nearest = IN_BYTES[dtype]
    most = Approx(x.size, x.error).max()
    scale, numbers = most / largest, x * (exact(largest) / most)
    error = numbers.error * stored.unit
    low, high = (np.clip(nearest(numbers.value + e), -largest, largest) for e in (-error, error))
    size = np.maximum(np.abs(low), np.abs(high))
    return (high - low) * scale.value / stored.unit + size * scale.error


def import_kv(stored, kv, block_ids, data) -> dict[str, Approx]:
    error = _no_error(kv)
    error[list(block_ids)] = _held(stored, exact(data), kv.dtype)
    return _in_memory(kv, error)


def _turned(stored: Stored, x: Approx, table: RotaryTable, positions: Tensor) -> Approx:
    """x [T, H, D] rotated."""
    half = table.dim // 2
    cos_sin = stored(exact(to_array(table.cos_sin)[positions.numpy(), None]))
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    first, second = slice(0, half), slice(half, table.dim)
    if table.interleaved:
        first, second = slice(0, table.dim, 2), slice(1, table.dim, 2)
    a, b = x[..., first], x[..., second]
    value, error = x.value.copy(), x.error.copy()
    for part, turned in (
        (first, stored(stored(a * cos) - stored(b * sin))),
        (second, stored(stored(b * cos) + stored(a * sin))),
    ):
        value[..., part], error[..., part] = turned.value, turned.error
    return Approx(value, error)


def rope_store(
    stored, qkv, kv, slots, positions, *, heads, kv_heads, head_dim, rotary, qk_norm, clip
) -> dict[str, Approx]:
    x = exact(qkv).reshape(len(qkv), heads + 2 * kv_heads, head_dim)
    if clip is not None:
        x = stored(Approx(np.clip(x.value, -clip, clip), x.error))

    def finished(x: Approx, norm: Literal["q", "k"]) -> Approx:
        if qk_norm is not None and not qk_norm.after_rope:
            x = _normed_heads(stored, x, getattr(qk_norm, norm), qk_norm.over)
        if rotary is not None:
            x = _turned(stored, x, rotary, positions[0])
        if qk_norm is not None and qk_norm.after_rope:
            x = _normed_heads(stored, x, getattr(qk_norm, norm), qk_norm.over)
        return x

    q = finished(x[:, :heads], "q")
    k, v = finished(x[:, heads : heads + kv_heads], "k"), x[:, heads + kv_heads :]
    error = _no_error(kv)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, kv.block_size)
            for i, vectors in enumerate((k, v)):
                error[at[0], i, at[1]] = _held(stored, vectors[token], kv.dtype)
    return {"0": q} | _in_memory(kv, error)


def rope_queries(stored, q, positions, *, heads, head_dim, rotary, q_norm) -> dict[str, Approx]:
    x = exact(q).reshape(len(q), heads, head_dim)
    if q_norm is not None:
        x = _normed(stored, x, q_norm)
    return {"0": x if rotary is None else _turned(stored, x, rotary, positions[0])}


def _normed_heads(stored: Stored, x: Approx, n: NormWeight, over: str) -> Approx:
    if over != "full":
        return _normed(stored, x, n)
    return _normed(stored, x.reshape(len(x.value), -1), n).reshape(*x.value.shape)


def attend(stored, q, kv, plan, args) -> dict[str, Approx]:
    rows = exact(q)
    found = [_attend_one(stored, rows[t], kv, *seen, args) for t, seen in enumerate(plan.seen)]
    return {"0": stored(join(found, q.shape[1] * q.shape[2]))}


def attend_prompts(stored, q, k, v, plan, *, scale, window) -> dict[str, Approx]:
    return attend_relative(stored, q, k, v, plan, NO_DISTANCES, scale=scale, window=window)


def attend_relative(stored, q, k, v, plan, relative, *, scale, window) -> dict[str, Approx]:
    r, queries, heads, dim = relative, exact(q), q.shape[1], q.shape[2]
    keys, values = (np.repeat(to_array(x), heads // k.shape[1], 1) for x in (k, v))
    found = []
    for token in range(len(q)):
        seen = plan.seen(token, window)
        near, columns = exact(keys[seen]), relative_columns(r, token, seen)
        scores = contract("hd,lhd->hl", queries[token], near, dim)
        if r.keys is not None:
            positions = exact(to_array(r.keys)[:, columns])
            scores = scores + contract("hd,hld->hl", queries[token], positions, dim)
        if r.queries is not None:
            positions = exact(to_array(r.queries)[:, columns])
            scores = scores + contract("hld,lhd->hl", positions, near, dim)
        scores = scores * scale
        if r.bias is not None:
            scores = scores + exact(to_array(r.bias)[:, columns])
        found.append(_weighed(stored, scores, exact(values[seen]), None))
    return {"0": stored(join(found, heads * dim))}


def _attend_one(
    stored: Stored, q: Approx, kv: OracleKV, distance: Array, slots: Array, args: AttentionArgs
) -> Approx:
    """One token's q [H, D] -> [1, H*D]."""
    heads = len(q.value)
    keys, values = (
        exact(np.repeat(held[slots], heads // kv.kv_heads, 1)) for held in (kv.keys, kv.values)
    )
    return _attend_to(stored, q, keys, values, distance, args)


def _attend_to(
    stored: Stored, q: Approx, keys: Approx, values: Approx, distance: Array, args: AttentionArgs
) -> Approx:
    """q [H, D], keys [L, H, D], values [L, H, V] -> [1, H*V]."""
    scores = contract("hd,lhd->hl", q, keys, q.value.shape[1]) * args.scale
    if args.softcap is not None:
        scores = tanh(scores / args.softcap) * args.softcap
    if args.alibi is not None:
        scores = scores + exact(args.alibi)[:, None] * exact(distance)
    sinks = None if args.sinks is None else to_array(args.sinks)[:, None]
    return _weighed(stored, scores, values, sinks)


def _weighed(stored: Stored, scores: Approx, values: Approx, sinks: Array | None) -> Approx:
    """scores [H, L], values [L, H, V] -> [1, H*V]."""
    top = scores.value.max(-1, keepdims=True)
    top = top if sinks is None else np.maximum(top, sinks)
    powers = stored(exp(scores - exact(top)))
    total = powers.sum()
    if sinks is not None:
        total = total + exp(exact(sinks) - exact(top))
    y = contract("hl,lhd->hd", powers, values, len(values.value)) / total
    return y.reshape(1, -1)


# latent attention


def heads_linear(stored, x, w) -> dict[str, Approx]:
    return {"0": stored(contract("thi,hoi->tho", exact(x), exact(w.weight), w.in_features))}


def latent_store(stored, q, x, latents, slots, positions, *, norm, rotary) -> dict[str, Approx]:
    rows, queries = exact(x), exact(q)
    latent, key = rows[:, : latents.rank], rows[:, None, latents.rank :]
    if rotary is not None:
        key, queries = (_turned(stored, part, rotary, positions[0]) for part in (key, queries))
    made = (_normed(stored, latent, norm), key[:, 0])
    error = np.zeros(tuple(latents.data.shape))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, latents.block_size)
            error[at] = np.concatenate([part.error[token] for part in made])
    return {"0": queries, "latents": Approx(to_array(latents.data), error)}


def latent_attend(stored, q, q_rotated, latents, plan, scale) -> dict[str, Approx]:
    return _latent_means(stored, q, q_rotated, latents, [slots for _, slots in plan.seen], scale)


def indexed_attend(stored, q, q_rotated, chosen, latents, plan, scale) -> dict[str, Approx]:
    return _latent_means(stored, q, q_rotated, latents, chosen_slots(chosen, plan), scale)


def _latent_means(
    stored: Stored,
    q: Tensor,
    q_rotated: Tensor,
    latents: LayerLatents,
    seen: Sequence[Array],
    scale: float,
) -> dict[str, Approx]:
    queries = exact(torch.cat((q.double(), q_rotated.double()), 2))
    memory = to_array(latents.data).reshape(-1, 1, latents.width)
    args, found = AttentionArgs(scale), []
    for token, slots in enumerate(seen):
        keys = exact(np.repeat(memory[slots], q.shape[1], 1))
        values = keys[..., : latents.rank]
        # without ALiBi, distances change nothing
        found.append(_attend_to(stored, queries[token], keys, values, np.zeros(len(slots)), args))
    whole = stored(join(found, q.shape[1] * q.shape[2]))
    return {"0": whole.reshape(*q.shape)}


def block_attend(
    stored, q, k, v, chosen, latents, slots, plan, *, scale, size
) -> dict[str, Approx]:
    heads, groups = q.shape[1], chosen.shape[1]
    memory = to_array(latents.data).reshape(-1, 2, *k.shape[1:])
    of_head = [head * k.shape[1] // heads for head in range(heads)]
    found = []
    for token, (distance, places) in enumerate(plan.seen):
        for head in range(heads):
            blocks = chosen[token, head * groups // heads].tolist()
            some = [i for i in range(len(places)) if i // size in blocks]
            both = memory[[places[i] for i in some]][:, :, of_head[head]][:, :, None]
            query, far = exact(q[token, head : head + 1]), np.asarray(distance)[some]
            keys, values = exact(both[:, 0]), exact(both[:, 1])
            found.append(_attend_to(stored, query, keys, values, far, AttentionArgs(scale)))
    whole = stored(join(found, q.shape[2]))
    return {"0": whole.reshape(*q.shape)}


# logits


def sum_chunks(stored, x, chunks, spans, rest) -> dict[str, Approx]:
    """The sums are in fp32 whatever the type of x."""
    found: list[list[Approx]] = [[], []]
    for prompt, (start, first, count) in enumerate(chunks.tolist()):
        whole, left = exact(spans[prompt]), exact(rest[prompt])
        for t in range(count):
            left = left + exact(x[start + t])
            if (first + t) % SPAN == SPAN - 1:
                whole, left = whole + left, exact(torch.zeros_like(rest[prompt]))
        found[0].append(whole)
        found[1].append(left)
    shape = tuple(spans.shape)
    return {
        str(i): Approx(
            np.array([row.value for row in rows]).reshape(shape),
            np.array([row.error for row in rows]).reshape(shape),
        )
        for i, rows in enumerate(found)
    }


def bias_logits(stored, logits, places, entries, values) -> dict[str, Approx]:
    added = np.zeros(tuple(logits.shape))
    for (place, token), value in zip(entries.tolist(), values.tolist(), strict=True):
        if token in range(logits.shape[1]):
            added[places[place, 0], token] = value
    raised = exact(logits) + exact(added)
    return {"0": Approx(np.where(np.isneginf(added), added, raised.value), raised.error)}


def penalize(stored, logits, history, places, penalties) -> dict[str, Approx]:
    x = exact(logits.clone())
    for place, (repetition, frequency, presence) in zip(
        places.tolist(), penalties.tolist(), strict=True
    ):
        index, row, border, position = place
        ids = history.numpy()[row, :position]
        seen, counts = (_counts(some, logits.shape[1]) for some in (ids, ids[border:]))
        factor = np.where(x.value[index] > 0, 1 / repetition, repetition)
        y = x[index] * exact(np.where(seen > 0, factor, 1.0))
        y = y - exact(counts) * frequency - exact(np.where(counts > 0, presence, 0.0))
        x.value[index], x.error[index] = y.value, y.error
    return {"0": x}


def _counts(ids: Array, width: int) -> Array:
    return np.bincount(ids[(ids >= 0) & (ids < width)], minlength=width)


def rank(stored, logits, token_ids, num_top) -> dict[str, Approx]:
    x = exact(logits)
    powers = exp(x - exact(x.value.max(-1, keepdims=True)))
    return {"4": log(powers.sum())[:, 0]}
