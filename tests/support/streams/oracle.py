"""The oracle of the ops of several residual streams, and of gates that are cut by their statistics:
a token, a stream, a number at a time.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from quire.ops.mixers.streams import HyperWeights
from tests.support.op_oracle_rows import (
    _ACTIVATIONS,
    Array,
    bounded,
    limited,
    stack,
    to_array,
    to_tensor,
)


def _rms(x: Array) -> float:
    return math.sqrt(sum(value * value for value in x) / len(x))


def _matched(y: Array, like: Array) -> Array:
    return y * _rms(like) / math.sqrt(max(_rms(y) ** 2, 1e-5))


def _shares(routed: Array, weight: Array) -> Array:
    return np.array([sum(np.tanh(routed) * row) for row in weight])


def join_streams(x, other) -> Tensor:
    pairs = zip(to_array(x), to_array(other), strict=True)
    rows = [np.array([*first, *second]) for first, second in pairs]
    return to_tensor(stack(rows, x.shape[1] + other.shape[1]))


def enter_streams(x, others) -> Tensor:
    """x, and the others with its magnitude."""
    width = x.shape[1]
    rows = [
        np.concatenate([row, *(_matched(y, row) for y in other.reshape(-1, width))])
        for row, other in zip(to_array(x), to_array(others), strict=True)
    ]
    return to_tensor(stack(rows, width + others.shape[1]))


def predict_streams(x, routed, weight) -> Tensor:
    """Each stream, and a share of each that depends on the token."""
    n, rows = routed.shape[1], []
    for row, numbers in zip(to_array(x), to_array(routed), strict=True):
        streams, matrix = row.reshape(n, -1), _shares(numbers, to_array(weight)).reshape(n, n)
        rows.append(
            np.concatenate(
                [streams[i] + sum(matrix[i, j] * streams[j] for j in range(n)) for i in range(n)]
            )
        )
    return to_tensor(stack(rows, x.shape[1]))


def correct_streams(x, activated, routed, weight, active) -> Tensor:
    """Each stream, and a share of what is new in the active one."""
    n, rows = routed.shape[1], []
    for row, result, numbers in zip(*map(to_array, (x, activated, routed)), strict=True):
        streams, shares = row.reshape(n, -1), _shares(numbers, to_array(weight))
        new = result - streams[active]
        rows.append(np.concatenate([streams[i] + (1 + shares[i]) * new for i in range(n)]))
    return to_tensor(stack(rows, x.shape[1]))


def add_to_streams(x, delta) -> Tensor:
    """Everything but the first stream changes."""
    width = delta.shape[1]
    y = to_array(x).copy()
    for start in range(width, x.shape[1], width):
        y[:, start : start + width] += to_array(delta)
    return to_tensor(y)


def collapse_streams(x, w, count) -> tuple[Tensor, Tensor]:
    sums, mixes = [], []
    for row in to_array(x):
        size = math.sqrt(sum(value * value for value in row) / len(row) + w.norm_eps)
        made = [float(np.dot(line, row)) / size for line in to_array(w.weight)]
        made = [
            n * s + b for n, s, b in zip(made, to_array(w.scale), to_array(w.base), strict=True)
        ]
        streams = row.reshape(count, -1)
        sums.append(sum((_sigmoid(made[i]) + w.eps) * streams[i] for i in range(count)))
        results = [2 * _sigmoid(n) for n in made[count : 2 * count]]
        matrix = _balanced(np.array(made[2 * count :]).reshape(-1, count), w)
        mixes.append([*results, *matrix.flatten()])
    width = len(w.weight) - count
    return to_tensor(stack(sums, x.shape[1] // count)), to_tensor(stack(mixes, width))


def _balanced(matrix: Array, w: HyperWeights) -> Array:
    if not matrix.size:
        return matrix
    y = np.array([np.exp(row) / sum(np.exp(row)) for row in matrix]) + w.eps
    for i in range(2 * w.rounds - 1):
        y = y.T if i % 2 == 0 else y
        y = np.array([row / (sum(row) + w.eps) for row in y])
        y = y.T if i % 2 == 0 else y
    return y


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expand_streams(x, delta, mix) -> Tensor:
    rows = []
    for row, result, numbers in zip(*map(to_array, (x, delta, mix)), strict=True):
        streams = row.reshape(-1, len(result))
        n = len(streams)
        matrix = numbers[n:].reshape(n, n)
        rows.append(
            np.concatenate(
                [
                    numbers[k] * result + sum(matrix[j, k] * streams[j] for j in range(n))
                    for k in range(n)
                ]
            )
        )
    return to_tensor(stack(rows, x.shape[1]))


def add_matched(total, y, like) -> Tensor:
    parts = zip(*map(to_array, (total, y, like)), strict=True)
    return to_tensor(stack([a + _matched(b, c) for a, b, c in parts], total.shape[1]))


def sparse_gated(gate_up, act, deviations) -> Tensor:
    width, f = gate_up.shape[1] // 2, _ACTIVATIONS[act]
    rows = []
    for row in to_array(gate_up):
        gate, up = row[:width], row[width:]
        mean = sum(gate) / width
        cut = mean + deviations * _rms(gate - mean)
        rows.append(np.array([f(max(g - cut, 0.0)) * u for g, u in zip(gate, up, strict=True)]))
    return to_tensor(stack(rows, width))


def bounded_gated(gate_up, act, bound) -> Tensor:
    width = gate_up.shape[1] // 2
    rows = [bounded(row, act, bound) for row in to_array(gate_up)]
    return to_tensor(stack(rows, width))


def clamped_gated(gate_up, limit) -> Tensor:
    width = gate_up.shape[1] // 2
    return to_tensor(stack([limited(row, limit) for row in to_array(gate_up)], width))
