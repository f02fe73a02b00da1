"""All ops once more, as loops in numpy float64: what the plain-torch definitions are checked
against.

Nothing here shares a line or an idea of layout with `quire.ops`: a token, a head, an expert at a
time, and KV memory as two arrays over slots that hold NaN where nobody wrote. Slow, and only for
the small cases. The functions stand as a provider named "oracle".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops import AttentionArgs, Implementation, MoeArgs, NormWeight, QKNorm, RotaryTable

Array = np.ndarray


def _array(x: Any) -> Array:
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x)


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=np.float64))


def _stack(rows: Sequence[Array], *shape: int) -> Array:
    return np.array(rows, dtype=np.float64).reshape(len(rows), *shape)


# norms and sums


def _norm_one(x: Array, n: NormWeight, weight: Array | None, bias: Array | None) -> Array:
    if not n.kind.startswith("rms"):
        x = x - sum(x) / len(x)
    x = x / math.sqrt(sum(value * value for value in x) / len(x) + n.eps)
    if weight is not None:
        x = x * (weight + 1 if n.kind.endswith("1p") else weight)
    return x if bias is None else x + bias


def _norm_array(x: Array, n: NormWeight) -> Array:
    weight = None if n.weight is None else np.broadcast_to(_array(n.weight), x.shape)
    bias = None if n.bias is None else np.broadcast_to(_array(n.bias), x.shape)
    y = np.empty_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        y[at] = _norm_one(
            x[at], n, None if weight is None else weight[at], None if bias is None else bias[at]
        )
    return y


def _norm(x: Tensor, n: NormWeight) -> Tensor:
    return _tensor(_norm_array(_array(x), n))


def _add(x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
    return _tensor(_array(x) + scale * _array(delta))


def _add_norm(x: Tensor, delta: Tensor, n: NormWeight, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    total = _add(x, delta, scale)
    return total, _norm(total, n)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _scale_gate(y: Tensor, gate: Tensor) -> Tensor:
    return _tensor(_array(y) * np.vectorize(_sigmoid, otypes=[float])(_array(gate)))


def _embed(
    ids: Tensor,
    table: Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_table: Tensor | None = None,
) -> Tensor:
    rows = [_array(table)[int(token)] * scale for token in ids]
    if positions is not None:
        rows = [
            row + _array(position_table)[int(p)] for row, p in zip(rows, positions, strict=True)
        ]
    return _tensor(_stack(rows, table.shape[1]))


# products


@dataclass
class OracleLinear:
    """weight [out, in] and bias [out] or None."""

    weight: Array
    bias: Array | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)

    def __call__(self, x: Array) -> Array:
        """x [in] -> [out]."""
        y = np.array([sum(x * row) for row in self.weight])
        return y if self.bias is None else y + self.bias


def _pack_linear(weight: Tensor, bias: Tensor | None) -> OracleLinear:
    return OracleLinear(_array(weight), None if bias is None else _array(bias))


def _per_row(x: Tensor, width: int, function: Callable[[Array], Array]) -> Tensor:
    return _tensor(_stack([function(row) for row in _array(x)], width))


def _linear(x: Tensor, w: OracleLinear) -> Tensor:
    return _per_row(x, w.out_features, w)


def _gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def _hidden(h: Array, act: str, is_gated: bool) -> Array:
    f = _ACTIVATIONS[act]
    if not is_gated:
        return np.array([f(value) for value in h])
    width = len(h) // 2
    return np.array([f(h[i]) * h[width + i] for i in range(width)])


def _mlp(x: Tensor, up: OracleLinear, down: OracleLinear, act: str, gated: bool) -> Tensor:
    return _per_row(x, down.out_features, lambda row: down(_hidden(up(row), act, gated)))


def _logits(
    x: Tensor, head: OracleLinear, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    y = _array(_linear(x, head)) * scale
    return _tensor(y if softcap is None else softcap * np.tanh(y / softcap))


# experts


@dataclass
class OracleExperts:
    """One (gate/up, down) pair of weights per expert."""

    pairs: list[tuple[OracleLinear, OracleLinear]]

    @property
    def experts(self) -> int:
        return len(self.pairs)

    @property
    def nbytes(self) -> int:
        return sum(up.nbytes + down.nbytes for up, down in self.pairs)


def _pack_experts(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> OracleExperts:
    def pair(e: int) -> tuple[OracleLinear, OracleLinear]:
        return (
            _pack_linear(gate_up[e], None if gate_up_bias is None else gate_up_bias[e]),
            _pack_linear(down[e], None if down_bias is None else down_bias[e]),
        )

    return OracleExperts([pair(e) for e in range(len(gate_up))])


def _limited(h: Array, limit: float) -> Array:
    width = len(h) // 2
    gate = [min(value, limit) for value in h[:width]]
    up = [min(max(value, -limit), limit) for value in h[width:]]
    return np.array([(u + 1) * g * _sigmoid(1.702 * g) for g, u in zip(gate, up, strict=True)])


def _softmax(x: Sequence[float]) -> list[float]:
    top = max(x)
    powers = [math.exp(value - top) for value in x]
    return [p / sum(powers) for p in powers]


def _choose(logits: Array, args: MoeArgs, select_bias: Array | None) -> list[tuple[int, float]]:
    """(expert, weight) of one token, best first."""
    score = {
        "softmax": _softmax,
        "sigmoid": lambda x: [_sigmoid(value) for value in x],
        "softmax_topk": list,
    }[args.score](logits)
    rank = [s + (0 if select_bias is None else select_bias[e]) for e, s in enumerate(score)]
    size = args.experts // args.groups
    members = [range(g * size, (g + 1) * size) for g in range(args.groups)]
    members.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:2]))
    kept = members if args.groups == 1 else members[: args.top_groups]
    eligible = [e for group in kept for e in group]
    best = sorted(eligible, key=lambda e: -rank[e])[: args.top_k]
    weights = [score[e] for e in best]
    if args.score == "softmax_topk":
        weights = _softmax(weights)
    elif args.renorm:
        weights = [w / sum(weights) for w in weights]
    return [(e, w * args.scale) for e, w in zip(best, weights, strict=True)]


def _moe(
    x: Tensor,
    router: OracleLinear,
    experts: OracleExperts,
    args: MoeArgs,
    select_bias: Tensor | None = None,
) -> Tensor:
    bias = None if select_bias is None else _array(select_bias)

    def one(row: Array) -> Array:
        total = np.zeros(len(row))
        for expert, weight in _choose(router(row), args, bias):
            up, down = experts.pairs[expert]
            h = up(row)
            h = _hidden(h, args.act, True) if args.clamp is None else _limited(h, args.clamp)
            total = total + weight * down(h)
        return total

    return _per_row(x, x.shape[1], one)


# KV memory


@dataclass
class OracleKV:
    """keys and values [N*S, K, D]; NaN in slots that nobody wrote."""

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

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


def _allocate_kv(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> OracleKV:
    assert device.type == "cpu"
    return OracleKV(num_blocks, block_size, kv_heads, head_dim, dtype)


def _export_kv(kv: OracleKV, block_ids: Sequence[int]) -> Tensor:
    shape = (len(block_ids), 2, kv.block_size, kv.kv_heads, kv.head_dim)
    data = np.empty(shape)
    for i, block in enumerate(block_ids):
        for offset in range(kv.block_size):
            slot = int(block) * kv.block_size + offset
            data[i, 0, offset], data[i, 1, offset] = kv.keys[slot], kv.values[slot]
    return _tensor(data)


def _import_kv(kv: OracleKV, block_ids: Sequence[int], data: Tensor) -> None:
    values = _array(data)
    for i, block in enumerate(block_ids):
        for offset in range(kv.block_size):
            slot = int(block) * kv.block_size + offset
            kv.keys[slot], kv.values[slot] = values[i, 0, offset], values[i, 1, offset]


def _copy_kv(kv: OracleKV, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    _import_kv(kv, dst_ids, _export_kv(kv, src_ids))


def _zero_kv(kv: OracleKV, block_ids: Sequence[int]) -> None:
    shape = (len(block_ids), 2, kv.block_size, kv.kv_heads, kv.head_dim)
    _import_kv(kv, block_ids, torch.zeros(shape))


def _rotated(x: Array, table: RotaryTable, position: int) -> Array:
    """One head x [D]."""
    y, half = x.copy(), table.dim // 2
    row = _array(table.cos_sin[position])
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if table.interleaved else (i, i + half)
        cos, sin = row[i], row[half + i]
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


def _normed(x: Array, n: NormWeight, over: str) -> Array:
    """All heads of one token, x [H, D]."""
    return _norm_array(x.reshape(-1), n).reshape(x.shape) if over == "full" else _norm_array(x, n)


def _rope_store(
    qkv: Tensor,
    kv: OracleKV,
    slots: Tensor,
    positions: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: RotaryTable | None,
    qk_norm: QKNorm | None,
    clip: float | None,
) -> Tensor:
    queries = []
    for token, row in enumerate(_array(qkv)):
        x = row if clip is None else np.minimum(np.maximum(row, -clip), clip)
        x = x.reshape(-1, head_dim)
        q, k, v = x[:heads], x[heads : heads + kv_heads], x[heads + kv_heads :]
        if qk_norm is not None and not qk_norm.after_rope:
            q, k = _normed(q, qk_norm.q, qk_norm.over), _normed(k, qk_norm.k, qk_norm.over)
        if rotary is not None:
            p = int(positions[0, token])
            q, k = (_stack([_rotated(h, rotary, p) for h in t], head_dim) for t in (q, k))
        if qk_norm is not None and qk_norm.after_rope:
            q, k = _normed(q, qk_norm.q, qk_norm.over), _normed(k, qk_norm.k, qk_norm.over)
        if int(slots[token]) >= 0:
            kv.keys[int(slots[token])], kv.values[int(slots[token])] = k, v
        queries.append(q)
    return _tensor(_stack(queries, heads, head_dim))


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
        return sum(len(slots) for _, slots in self.seen)


def _plan_attention(
    *,
    query_start: Array,
    seq_lens: Array,
    block_table: Tensor,
    block_size: int,
    window: int | None,
) -> OraclePlan:
    table = _array(block_table).astype(np.int64)
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


def _attend(q: Tensor, kv: OracleKV, plan: OraclePlan, args: AttentionArgs) -> Tensor:
    rows = zip(_array(q), plan.seen, strict=True)
    return _tensor(
        _stack([_attend_one(one, kv, *seen, args) for one, seen in rows], q.shape[1] * q.shape[2])
    )


IMPLEMENTATIONS = tuple(
    Implementation(function.__name__[1:], "oracle", function, lambda _: True, batch_invariant=True)
    for function in (
        _embed,
        _norm,
        _add,
        _add_norm,
        _scale_gate,
        _pack_linear,
        _linear,
        _mlp,
        _logits,
        _allocate_kv,
        _export_kv,
        _import_kv,
        _copy_kv,
        _zero_kv,
        _rope_store,
        _plan_attention,
        _attend,
        _pack_experts,
        _moe,
    )
)
