"""The oracle of the ops that treat each token by itself: norms, products, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops import CodedWeight, NormWeight, RouteArgs
from quire.ops.segments import Addend

Array = np.ndarray


def to_array(x: Any) -> Array:
    """Numbers as float64, integers as they are."""
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x)


def to_tensor(x: Any) -> Tensor:
    """A float64 tensor."""
    return torch.from_numpy(np.array(x, dtype=np.float64))


def stack(rows: Sequence[Array], *shape: int) -> Array:
    """Rows [n, *shape], for n = 0 too."""
    return np.array(rows, dtype=np.float64).reshape(len(rows), *shape)


# norms and sums


def _norm_one(x: Array, n: NormWeight, weight: Array | None, bias: Array | None) -> Array:
    if not n.kind.startswith("rms"):
        x = x - sum(x) / len(x)
    x = x / math.sqrt(sum(value * value for value in x) / len(x) + n.eps)
    if weight is not None:
        x = x * (weight + 1 if n.kind.endswith("1p") else weight)
    return x if bias is None else x + bias


def norm_array(x: Array, n: NormWeight) -> Array:
    """x [*, C] normalised, one vector after the other."""
    weight = None if n.weight is None else np.broadcast_to(to_array(n.weight), x.shape)
    bias = None if n.bias is None else np.broadcast_to(to_array(n.bias), x.shape)
    y = np.empty_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        y[at] = _norm_one(
            x[at], n, None if weight is None else weight[at], None if bias is None else bias[at]
        )
    return y


def norm(x, n) -> Tensor:
    return to_tensor(norm_array(to_array(x), n))


def add(x, delta, scale=1.0) -> Tensor:
    return to_tensor(to_array(x) + scale * to_array(delta))


def add_norm(x, delta, n, scale=1.0) -> tuple[Tensor, Tensor]:
    total = add(x, delta, scale)
    return total, norm(total, n)


def multiply(x, factors) -> Tensor:
    return to_tensor(to_array(x) * to_array(factors))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def scale_gate(y, gate) -> Tensor:
    return to_tensor(to_array(y) * np.vectorize(_sigmoid, otypes=[float])(to_array(gate)))


def scale_heads(y, gate) -> Tensor:
    opened = np.vectorize(_sigmoid, otypes=[float])(to_array(gate))
    return to_tensor(to_array(y) * np.repeat(opened, y.shape[1] // gate.shape[1], axis=1))


def scale_queries(q, positions, factors) -> Tensor:
    found = [to_array(factors)[p] * to_array(q)[t] for t, p in enumerate(positions[0].tolist())]
    return to_tensor(stack(found, *q.shape[1:]))


def mix_axes(positions, table, axes) -> Tensor:
    """Each frequency's cosine and sine at the token's position on its axis."""
    source, half = to_array(table), len(axes)
    found = [
        [source[positions[axes[i % half], t], i] for i in range(2 * half)]
        for t in range(positions.shape[1])
    ]
    return to_tensor(stack(found, 2 * half))


def xielu(x, numbers) -> Tensor:
    """The activation with learned numbers, value by value."""
    *learned, beta, eps = to_array(numbers)
    p, n = (math.log1p(math.exp(alpha)) for alpha in learned)

    def one(y: float) -> float:
        if y > 0:
            return p * y * y + beta * y
        return (math.expm1(min(y, eps)) - y) * (beta + n) + beta * y

    return to_tensor(np.vectorize(one, otypes=[float])(to_array(x)))


def embed(ids, table, scale=1.0, positions=None, position_table=None) -> Tensor:
    rows = [to_array(table)[int(token)] * scale for token in ids]
    if positions is not None:
        rows = [
            row + to_array(position_table)[int(p)] for row, p in zip(rows, positions, strict=True)
        ]
    return to_tensor(stack(rows, table.shape[1]))


def embed_packed(ids, w, scale=1.0) -> Tensor:
    return to_tensor(stack([w.weight[int(token)] * scale for token in ids], w.in_features))


# products


@dataclass
class OracleLinear:
    """weight [out, in] and bias [out] or None."""

    weight: Array
    bias: Array | None
    segments: int = 1

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Array) -> Array:
        """x [in] -> [out]."""
        y = np.array([sum(x * row) for row in self.weight])
        return y if self.bias is None else y + self.bias


def _small_float(code: int) -> float:
    """The number of an e4m3: a sign, an exponent of four bits, a fraction of three."""
    exponent, fraction = code // 8 % 16, code % 8
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if code >= 128 else size


def _of_codes(w: CodedWeight) -> Array:
    """A weight in codes, number by number."""
    codes, scales = to_array(w.codes).astype(int), to_array(w.scales)
    order = range(w.in_features) if w.order is None else w.order.tolist()
    weight = np.zeros((len(scales), w.in_features))
    for o, row in enumerate(codes):
        for i, place in enumerate(order):
            code = row[i] if w.bits == 8 else row[i // 2] // 16 ** (i % 2) % 16
            if w.are_floats or w.table is not None:
                number = _small_float(code) if w.table is None else w.table[code]
                weight[o, place] = number * scales[o, i // w.group]
                continue
            zero = 2 ** (w.bits - 1) if w.zeros is None else int(w.zeros[o, i // w.group])
            weight[o, place] = (code - zero) * scales[o, i // w.group]
    return weight


def pack_linear(weight, bias, stored_as=None, segments=1, gated=False) -> OracleLinear:
    values = _of_codes(weight) if isinstance(weight, CodedWeight) else to_array(weight)
    return OracleLinear(values, None if bias is None else to_array(bias), segments)


def _per_row(x: Tensor, width: int, function: Callable[[Array], Array]) -> Tensor:
    return to_tensor(stack([function(row) for row in to_array(x)], width))


def linear(x, w, addend=None) -> Tensor:
    return to_tensor(_added(to_array(_per_row(x, w.out_features, w)), addend))


def _gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def modulate(x, by, act) -> Tensor:
    y = np.vectorize(_ACTIVATIONS[act], otypes=[float])(to_array(x))
    return to_tensor(y * to_array(by))


def _hidden(h: Array, act: str, is_gated: bool) -> Array:
    f = _ACTIVATIONS[act]
    if not is_gated:
        return np.array([f(value) for value in h])
    width = len(h) // 2
    return np.array([f(h[i]) * h[width + i] for i in range(width)])


def hidden(x, up, act, gated, addend=None) -> Tensor:
    width = up.out_features // (2 if gated else 1)
    rows = [_hidden(row, act, gated) for row in to_array(linear(x, up, addend))]
    return to_tensor(stack(rows, width))


def row_peaks(x) -> Tensor:
    """The largest magnitude of each row, NaN unless all are finite."""
    rows = to_array(x)
    return to_tensor([max(map(abs, row)) if np.isfinite(row).all() else math.nan for row in rows])


def sum_chunks(x, chunks, spans, rest) -> None:
    """Token by token; a span of 32 positions is closed by its last one."""
    rows = to_array(x)
    for prompt, (start, first, count) in enumerate(chunks.tolist()):
        for t in range(count):
            rest[prompt] += to_tensor(rows[start + t])
            if (first + t) % 32 == 31:
                spans[prompt] += rest[prompt]
                rest[prompt] = 0


def linear_partial(x, w, peaks=None) -> Tensor:
    sums = [[sum(row * out) for out in w.weight] for row in to_array(x)]
    return to_tensor(np.array(sums).reshape(len(x), w.out_features))


def linear_total(parts, w, peaks, dtype, addend=None) -> Tensor:
    """All parts, one after the other, bias and addend."""
    total = sum(to_array(parts[:, i]) for i in range(parts.shape[1]))
    return to_tensor(_added(total if w.bias is None else total + w.bias, addend))


def _added(y: Array, addend: Any) -> Array:
    """`addend`: an `Addend` or what the oracle has of adapters."""
    y = y.copy()
    if addend is not None and not isinstance(addend, Addend):
        return y + np.array([addend.of(t) for t in range(len(y))]).reshape(y.shape)
    for t, row in enumerate([] if addend is None else addend.rows.tolist()):
        if row >= 0:
            y[t] += to_array(addend.values)[row]
    return y


def logits(x, head, scale=1.0, softcap=None, addend=None) -> Tensor:
    y = to_array(linear(x, head, addend)) * scale
    return to_tensor(y if softcap is None else softcap * np.tanh(y / softcap))


# experts


@dataclass
class OracleExperts:
    """One (gate/up, down) pair of weights per expert."""

    pairs: list[tuple[OracleLinear, OracleLinear]]

    @property
    def experts(self) -> int:
        return len(self.pairs)


def pack_experts(up, down, up_bias=None, down_bias=None, gated=False) -> OracleExperts:
    def pair(e: int) -> tuple[OracleLinear, OracleLinear]:
        return (
            pack_linear(up[e], None if up_bias is None else up_bias[e]),
            pack_linear(down[e], None if down_bias is None else down_bias[e]),
        )

    return OracleExperts([pair(e) for e in range(len(up))])


def limited(h: Array, limit: float) -> Array:
    width = len(h) // 2
    gate = [min(value, limit) for value in h[:width]]
    up = [min(max(value, -limit), limit) for value in h[width:]]
    return np.array([(u + 1) * g * _sigmoid(1.702 * g) for g, u in zip(gate, up, strict=True)])


def bounded(h: Array, act: str, bound: float) -> Array:
    """act(gate) up to the bound, times up within it."""
    width, f = len(h) // 2, _ACTIVATIONS[act]
    pairs = zip(h[:width], h[width:], strict=True)
    return np.array([min(f(g), bound) * min(max(u, -bound), bound) for g, u in pairs])


def _softmax(x: Sequence[float]) -> list[float]:
    top = max(x)
    powers = [math.exp(value - top) for value in x]
    return [p / sum(powers) for p in powers]


def choose(logits: Array, args: RouteArgs, select_bias: Array | None) -> list[tuple[int, float]]:
    """(expert, weight) of one token, best first."""
    if args.score == "sparsemixer":
        return _mix_sparsely(list(logits), args)
    score = {
        "softmax": _softmax,
        "sigmoid": lambda x: [_sigmoid(value) for value in x],
        "softmax_topk": list,
        "sigmoid_topk": list,
    }[args.score](logits)
    rank = [s + (0 if select_bias is None else select_bias[e]) for e, s in enumerate(score)]
    size = len(logits) // args.groups
    members = [range(g * size, (g + 1) * size) for g in range(args.groups)]
    members.sort(
        key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[: args.group_best])
    )
    kept = members if args.groups == 1 else members[: args.top_groups]
    eligible = [e for group in kept for e in group]
    best = sorted(eligible, key=lambda e: -rank[e])[: args.top_k]
    weights = [score[e] for e in best]
    if args.score == "softmax_topk":
        weights = _softmax(weights)
    elif args.score == "sigmoid_topk":
        weights = [_sigmoid(w) for w in weights]
    elif args.renorm:
        weights = [w / max(sum(weights) + args.renorm_eps, args.renorm_min) for w in weights]
    return [(e, w * args.scale) for e, w in zip(best, weights, strict=True)]


def near(logits: Sequence[float], taken: Sequence[int], jitter: float) -> list[int]:
    """The experts that compete with the best of those not taken, that one first (sparsemixer)."""
    free = sorted(set(range(len(logits))) - set(taken), key=lambda e: -logits[e])
    best = logits[free[0]]
    return [e for e in free if (best - logits[e]) / max(abs(logits[e]), best) <= 2 * jitter]


def _mix_sparsely(logits: Sequence[float], args: RouteArgs) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for _ in range(args.top_k):
        rivals = near(logits, [e for e, _ in found], args.jitter)
        share = _softmax([logits[e] for e in rivals])[0]
        found.append((rivals[0], share * args.scale))
    return found


def route(logits, args, select_bias=None, expert_scales=None) -> tuple[Tensor, Tensor]:
    bias = None if select_bias is None else to_array(select_bias)
    found = [choose(row, args, bias) for row in to_array(logits)]
    if expert_scales is not None:
        scales = to_array(expert_scales)
        found = [[(e, w * scales[e]) for e, w in row] for row in found]
    shape = len(found), args.top_k
    chosen = np.reshape([[e for e, _ in row] for row in found], shape).astype(np.int32)
    weights = np.reshape([[w for _, w in row] for row in found], shape)
    return torch.from_numpy(chosen), to_tensor(weights)


def route_softplus(
    logits, top_k, scale, select_bias=None, ids=None, table=None
) -> tuple[Tensor, Tensor]:
    bias = np.zeros(logits.shape[1]) if select_bias is None else to_array(select_bias)
    chosen, weights = [], []
    for t, row in enumerate(to_array(logits)):
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in row]
        best = sorted(range(len(row)), key=lambda e: (-scores[e] - bias[e], e))[:top_k]  # noqa: B023
        if table is not None and ids is not None:
            best = table[int(ids[t])].tolist()
        chosen.append(best)
        weights.append([scale * scores[e] / sum(scores[i] for i in best) for e in best])
    shape = len(logits), top_k
    experts = torch.from_numpy(np.reshape(chosen, shape).astype(np.int32))
    return experts, to_tensor(np.reshape(weights, shape))


def expert_slot(adapters: Any, token: int, expert: int) -> int:
    """Where the banks of experts have that of a token's expert, or -1."""
    slot = -1 if adapters is None else int(adapters.slots[token])
    return slot * adapters.experts + expert if slot >= 0 else -1


def moe(x, chosen, weights, experts, args, adapters=None) -> Tensor:
    def one(row: Array, token: int) -> Array:
        total = np.zeros(len(row))
        for e, w in zip(chosen[token].tolist(), to_array(weights[token]), strict=True):
            up, down = experts.pairs[e]
            slot, own = expert_slot(adapters, token, e), row * w if args.weighs_input else row
            h = up(own) + (adapters.up.added(slot, own) if slot >= 0 else 0)
            if args.clamp is not None:
                h = limited(h, args.clamp)
            elif args.bound is not None:
                h = bounded(h, args.act, args.bound)
            else:
                h = _hidden(h, args.act, args.gated)
            y = down(h) + (adapters.down.added(slot, h) if slot >= 0 else 0)
            total = total + (1 if args.weighs_input else w) * y
        return total

    rows = [one(row, token) for token, row in enumerate(to_array(x))]
    return to_tensor(stack(rows, x.shape[1]))
