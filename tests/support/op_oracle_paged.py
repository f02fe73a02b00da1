"""The oracle of the ops on KV memory: moving blocks, rotary embedding with its write, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.ops import AttentionArgs, NormWeight, RelativeScores, RotaryTable
from quire.ops.kv import BlockShape, KVShape, LayerLatents, LayerState, StateShape
from tests.support.op_oracle_rows import Array, norm_array, stack, to_array, to_tensor

# KV memory


@dataclass
class OracleKV:
    """keys and values [N*S, K, D]; NaN in slots that nobody wrote. Memory in int8 or e4m3
    holds what such numbers times scales in float32 give.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    keys: Array = field(init=False)
    values: Array = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_blocks * self.block_size, self.kv_heads, self.head_dim)
        self.keys, self.values = np.full(shape, np.nan), np.full(shape, np.nan)

    def put(self, slots: int | slice, keys: Array, values: Array) -> None:
        """Store the keys and values [K, D] of a slot, or [n, K, D] of several."""
        if self.dtype in IN_BYTES:
            keys, values = (_in_bytes(x, *IN_BYTES[self.dtype]) for x in (keys, values))
        self.keys[slots], self.values[slots] = keys, values

    def slots_of(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


def _nearest_e4m3(numbers: Array) -> Array:
    """To float32 numbers of up to 448: three bits behind the leading one, or multiples of 2**-9."""
    _, exponent = np.frexp(numbers)  # the leading bit is 2 ** (exponent - 1)
    step = np.exp2(np.maximum(exponent - 1, -6) - 3.0)
    return np.rint(numbers / step) * step


def _in_bytes(vectors: Array, largest: float, nearest: Callable[[Array], Array]) -> Array:
    """Vectors [*, D] as numbers of up to `largest` times a scale by which their largest gets it."""
    x, steps = vectors.astype(np.float32), np.float32(largest)
    most = np.abs(x).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        numbers = np.where(most >= 1e-30, nearest(x * (steps / most)), 0.0)
        result = numbers.astype(np.float64) * (most / steps)
    return np.where(np.isfinite(x).all(-1, keepdims=True), result, np.nan)


IN_BYTES: dict[torch.dtype, tuple[float, Callable[[Array], Array]]] = {
    torch.int8: (127.0, np.rint),
    torch.float8_e4m3fn: (448.0, _nearest_e4m3),
}
"""Types with scales: their largest number, and how numbers are rounded."""


def allocate_kv(num_blocks, block_size, kv_heads, head_dim, dtype, *, device) -> OracleKV:
    """Empty memory: NaN everywhere."""
    assert device.type == "cpu"
    return OracleKV(num_blocks, block_size, kv_heads, head_dim, dtype)


def allocate_shared_kv(
    num_blocks, shapes, dtype, *, device
) -> tuple[OracleKV | LayerState | LayerLatents, ...]:
    """Memory for each shape: what another one finds where one has written is arbitrary."""

    def view(shape: BlockShape) -> OracleKV | LayerState | LayerLatents:
        if isinstance(shape, KVShape):
            return OracleKV(num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, dtype)
        if isinstance(shape, StateShape):
            return LayerState(torch.full((num_blocks, shape.num_bytes), 0x55, dtype=torch.uint8))
        lanes = (num_blocks, shape.block_size, shape.rank + shape.rotated)
        data = torch.full(lanes, math.nan, dtype=torch.float64)
        if not shape.index_dim:
            return LayerLatents(data, shape.rank)
        keys = (*lanes[:2], shape.index_dim)
        return LayerLatents(data, shape.rank, torch.full(keys, math.nan, dtype=torch.float64))

    return tuple(map(view, shapes))


def export_kv(kv, block_ids) -> Tensor:
    shape = (len(block_ids), 2, kv.block_size, kv.kv_heads, kv.head_dim)
    data = np.empty(shape)
    for i, block in enumerate(block_ids):
        slots = kv.slots_of(int(block))
        data[i, 0], data[i, 1] = kv.keys[slots], kv.values[slots]
    return to_tensor(data)


def import_kv(kv, block_ids, data) -> None:
    values = to_array(data)
    for i, block in enumerate(block_ids):
        kv.put(kv.slots_of(int(block)), values[i, 0], values[i, 1])


def copy_kv(kv, src_ids, dst_ids) -> None:
    """Copy blocks; all are read first."""
    import_kv(kv, dst_ids, export_kv(kv, src_ids))


def zero_kv(kv, block_ids) -> None:
    shape = (len(block_ids), 2, kv.block_size, kv.kv_heads, kv.head_dim)
    import_kv(kv, block_ids, torch.zeros(shape))


def _rotated(x: Array, table: RotaryTable, position: int) -> Array:
    """One head x [D]."""
    y, half = x.copy(), table.dim // 2
    row = to_array(table.cos_sin[position])
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if table.interleaved else (i, i + half)
        cos, sin = row[i], row[half + i]
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


def _normed(x: Array, n: NormWeight, over: str) -> Array:
    """All heads of one token, x [H, D]."""
    return norm_array(x.reshape(-1), n).reshape(x.shape) if over == "full" else norm_array(x, n)


def rope_store(
    qkv, kv, slots, positions, *, heads, kv_heads, head_dim, rotary, qk_norm, clip
) -> Tensor:
    queries = []
    for token, row in enumerate(to_array(qkv)):
        x = row if clip is None else np.minimum(np.maximum(row, -clip), clip)
        x = x.reshape(-1, head_dim)
        q, k, v = x[:heads], x[heads : heads + kv_heads], x[heads + kv_heads :]
        if qk_norm is not None and not qk_norm.after_rope:
            q, k = _normed(q, qk_norm.q, qk_norm.over), _normed(k, qk_norm.k, qk_norm.over)
        if rotary is not None:
            p = int(positions[0, token])
            q, k = (stack([_rotated(h, rotary, p) for h in t], head_dim) for t in (q, k))
        if qk_norm is not None and qk_norm.after_rope:
            q, k = _normed(q, qk_norm.q, qk_norm.over), _normed(k, qk_norm.k, qk_norm.over)
        if int(slots[token]) >= 0:
            kv.put(int(slots[token]), k, v)
        queries.append(q)
    return to_tensor(stack(queries, heads, head_dim))


def rope_queries(q, positions, *, heads, head_dim, rotary, q_norm) -> Tensor:
    queries = []
    for token, row in enumerate(to_array(q)):
        x = row.reshape(heads, head_dim)
        x = x if q_norm is None else _normed(x, q_norm, "head")
        if rotary is not None:
            x = stack([_rotated(head, rotary, int(positions[0, token])) for head in x], head_dim)
        queries.append(x)
    return to_tensor(stack(queries, heads, head_dim))


# attention


@dataclass
class OraclePlan:
    """For every new token of the step: distances (position - its own) and slots of the keys it
    sees.
    """

    seen: list[tuple[Array, Array]]
    num_keys: int

    @property
    def num_pairs(self) -> int:
        """(query, visible key) pairs."""
        return sum(len(slots) for _, slots in self.seen)


def plan_attention(
    *, query_start, seq_lens, block_table, block_size, window, kv_heads=None
) -> OraclePlan:
    table = to_array(block_table).astype(np.int64)
    seen, num_keys = [], 0
    for row, length in enumerate(seq_lens.tolist()):
        new = int(query_start[row + 1]) - int(query_start[row])
        distinct = set()
        for p in range(length - new, length):
            keys = np.arange(p + 1)
            if window is not None:
                keys = keys[keys > p - window]
            seen.append((keys - p, table[row, keys // block_size] * block_size + keys % block_size))
            distinct.update(keys[[0, -1]].tolist())
        num_keys += max(distinct) - min(distinct) + 1 if distinct else 0
    return OraclePlan(seen, num_keys)


def _scores(q: Array, k: Array, distance: Array, head: int, args: AttentionArgs) -> Array:
    """One query q [D] against the keys k [L, D] -> [L]."""
    scores = args.scale * (k @ q)
    if args.softcap is not None:
        scores = args.softcap * np.tanh(scores / args.softcap)
    return scores if args.alibi is None else scores + float(args.alibi[head]) * distance


def _attend_one(
    q: Array, kv: OracleKV, distance: Array, slots: Array, args: AttentionArgs
) -> Array:
    """One token's q [H, D] -> [H*D]."""
    out = np.zeros_like(q)
    keys, values = kv.keys[slots], kv.values[slots]
    for head, query in enumerate(q):
        kv_head = head // (len(q) // kv.kv_heads)
        scores = _scores(query, keys[:, kv_head], distance, head, args)
        sink = -math.inf if args.sinks is None else float(args.sinks[head])
        top = max(scores.max(), sink)
        powers = np.exp(scores - top)
        out[head] = powers @ values[:, kv_head] / (powers.sum() + math.exp(sink - top))
    return out.reshape(-1)


def attend(q, kv, plan, args) -> Tensor:
    rows = zip(to_array(q), plan.seen, strict=True)
    return to_tensor(
        stack([_attend_one(one, kv, *seen, args) for one, seen in rows], q.shape[1] * q.shape[2])
    )


# attention within whole prompts


@dataclass
class OraclePrompts:
    """For every token of the step, the first token of its prompt and the end of it."""

    prompts: list[tuple[int, int]]

    def seen(self, token: int, window: int | None) -> Array:
        """The tokens that a token sees."""
        first, stop = self.prompts[token]
        keys = np.arange(first, stop)
        return keys if window is None else keys[np.abs(keys - token) < window]


def plan_prompts(*, query_start, seq_lens) -> OraclePrompts:
    rows = zip(query_start.tolist(), seq_lens.tolist(), strict=False)
    return OraclePrompts([(at, at + n) for at, n in rows for _ in range(n)])


NO_DISTANCES = RelativeScores(torch.zeros(1, dtype=torch.int64))


def attend_prompts(q, k, v, plan, *, scale, window) -> Tensor:
    return attend_relative(q, k, v, plan, NO_DISTANCES, scale=scale, window=window)


def relative_columns(relative: RelativeScores, token: int, seen: Array) -> Array:
    """The columns of the keys that a token sees."""
    columns = relative.columns.tolist()
    reach = len(columns) // 2
    return np.array([columns[max(-reach, min(reach, key - token)) + reach] for key in seen])


def attend_relative(q, k, v, plan, relative, *, scale, window) -> Tensor:
    r, (queries, keys, values) = relative, map(to_array, (q, k, v))
    out = np.zeros_like(queries)
    for token, heads in enumerate(queries):
        seen = plan.seen(token, window)
        columns = relative_columns(r, token, seen)
        for head, query in enumerate(heads):
            kv_head = head // (len(heads) // k.shape[1])
            scores = keys[seen, kv_head] @ query
            if r.keys is not None:
                scores = scores + to_array(r.keys)[head, columns] @ query
            if r.queries is not None:
                scores = scores + (to_array(r.queries)[head, columns] * keys[seen, kv_head]).sum(1)
            scores = scale * scores
            if r.bias is not None:
                scores = scores + to_array(r.bias)[head, columns]
            powers = np.exp(scores - scores.max())
            out[token, head] = powers @ values[seen, kv_head] / powers.sum()
    return to_tensor(out.reshape(len(out), q.shape[1] * q.shape[2]))


# latent attention


@dataclass
class OracleHeads:
    """weight [H, out, in]."""

    weight: Array

    @property
    def heads(self) -> int:
        return len(self.weight)

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[2])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[1])


def pack_heads(weight) -> OracleHeads:
    return OracleHeads(to_array(weight))


def heads_linear(x, w) -> Tensor:
    rows = [
        [[sum(head * out) for out in weight] for head, weight in zip(token, w.weight, strict=True)]
        for token in to_array(x)
    ]
    return to_tensor(np.array(rows, dtype=np.float64).reshape(len(x), w.heads, w.out_features))


def latent_store(q, x, latents, slots, positions, *, norm, rotary) -> Tensor:
    queries = []
    for token, row in enumerate(to_array(x)):
        latent, key = row[: latents.rank], row[latents.rank :]
        heads = to_array(q[token])
        if rotary is not None:
            p = int(positions[0, token])
            key = _rotated(key, rotary, p)
            heads = stack([_rotated(h, rotary, p) for h in heads], heads.shape[1])
        queries.append(heads)
        if int(slots[token]) >= 0:
            block, offset = divmod(int(slots[token]), latents.block_size)
            whole = np.concatenate((norm_array(latent, norm), key))
            latents.data[block, offset] = torch.from_numpy(whole)
    return to_tensor(stack(queries, *q.shape[1:]))


def plan_latent(**step) -> OraclePlan:
    return plan_attention(**step, window=None)


plan_indexed = plan_latent


def latent_attend(q, q_rotated, latents, plan, scale) -> Tensor:
    return _latent_means(q, q_rotated, latents, [slots for _, slots in plan.seen], scale)


def _latent_means(
    q: Tensor, q_rotated: Tensor, latents: LayerLatents, seen: Sequence[Array], scale: float
) -> Tensor:
    memory = to_array(latents.data).reshape(-1, latents.width)
    rows = []
    for token, slots in enumerate(seen):
        heads = np.concatenate((to_array(q[token]), to_array(q_rotated[token])), 1)
        keys = memory[slots]
        for head in heads:
            scores = scale * (keys @ head)
            powers = np.exp(scores - scores.max())
            rows.append(powers @ keys[:, : latents.rank] / powers.sum())
    return to_tensor(np.array(rows, dtype=np.float64).reshape(q.shape))


def index_select(q, k, weights, latents, slots, plan, top_k) -> Tensor:
    """Store, then score every token that a new one sees by itself."""
    assert latents.keys is not None
    _put(latents.keys, slots, k)
    memory = to_array(latents.keys).reshape(-1, latents.keys.shape[2])
    heads, dim = q.shape[1:]
    found = np.full((len(q), top_k), -1, dtype=np.int64)
    for token, (_, seen) in enumerate(plan.seen):
        scores = []
        for slot in seen:
            products = to_array(q[token]) @ memory[slot] / math.sqrt(dim)
            by_head = to_array(weights[token]) * np.maximum(products, 0.0) / math.sqrt(heads)
            scores.append(float(by_head.sum()))
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]
        found[token, : len(best)] = sorted(best)
    return torch.from_numpy(found)


def indexed_attend(q, q_rotated, chosen, latents, plan, scale) -> Tensor:
    return _latent_means(q, q_rotated, latents, chosen_slots(chosen, plan), scale)


def chosen_slots(chosen: Tensor, plan: OraclePlan) -> list[list[int]]:
    """The slots of each token's choice, where it is one of what the token sees."""
    return [
        [slots[i] for i in some if i >= 0]
        for some, (_, slots) in zip(chosen.tolist(), plan.seen, strict=True)
    ]


def block_select(q, k, latents, slots, plan, *, size, top_k, local) -> Tensor:
    """Store, then score every block by its best key."""
    assert latents.keys is not None
    _put(latents.keys, slots, k)
    memory = to_array(latents.keys).reshape(-1, latents.keys.shape[2])
    found = np.full((*q.shape[:2], top_k), -1, dtype=np.int64)
    for token, (_, seen) in enumerate(plan.seen):
        for head, query in enumerate(to_array(q[token])):
            products = [float(memory[slot] @ query) for slot in seen]
            scores = [max(products[i : i + size]) for i in range(0, len(seen), size)]
            first = len(scores) - local
            ranked = sorted(range(len(scores)), key=lambda b: (b < first, -scores[b], b))  # noqa: B023
            best = sorted(ranked[:top_k])
            found[token, head, : len(best)] = best
    return torch.from_numpy(found)


def block_attend(q, k, v, chosen, latents, slots, plan, *, scale, size) -> Tensor:
    """Store, then attend with one head at a time."""
    _put(latents.data, slots, torch.cat((k.flatten(1), v.flatten(1)), 1))
    memory = to_array(latents.data).reshape(-1, 2, *k.shape[1:])
    heads, groups = q.shape[1], chosen.shape[1]
    rows = []
    for token, (_, seen) in enumerate(plan.seen):
        for head, query in enumerate(to_array(q[token])):
            blocks = chosen[token, head * groups // heads].tolist()
            places = [slot for i, slot in enumerate(seen) if i // size in blocks]
            keys, values = memory[places][:, :, head * k.shape[1] // heads].transpose(1, 0, 2)
            scores = scale * (keys @ query)
            powers = np.exp(scores - scores.max())
            rows.append(powers @ values / powers.sum())
    return to_tensor(np.array(rows, dtype=np.float64).reshape(q.shape))


def _put(memory: Tensor, slots: Tensor, rows: Tensor) -> None:
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            memory[divmod(slot, memory.shape[1])] = rows[token].to(memory.dtype)
