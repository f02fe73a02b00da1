"""Bounds of the ops of several residual streams; see op_bounds."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.ops.mixers.streams import HyperWeights
from tests.support.running_error import Approx, contract, join, sigmoid, softmax, sqrt, tanh

exact = Approx.exact


def moments(x: Approx) -> tuple[Approx, Approx]:
    """Mean and standard deviation of the last axis."""
    mean = x.mean()
    centred = x - mean
    return mean, exact(1.0) / (exact(1.0) / sqrt((centred * centred).mean()))


def _matched(y: Approx, like: Approx) -> Approx:
    size, least = _mean_square(like), _mean_square(y)
    least = Approx(np.maximum(least.value, 1e-5), least.error)
    return y * (sqrt(size) / sqrt(least))


def _mean_square(x: Approx) -> Approx:
    mean, deviation = moments(x)
    return mean * mean + deviation * deviation


def _shares(routed: Tensor, weight: Tensor) -> Approx:
    return contract("tk,mk->tm", tanh(exact(routed)), exact(weight), weight.shape[1])


def _streams(x: Tensor, n: int) -> Approx:
    return exact(x).reshape(len(x), n, x.shape[1] // n)


def join_streams(stored, x, other) -> dict[str, Approx]:
    return {"0": _side_by_side(exact(x), exact(other))}


def _side_by_side(x: Approx, other: Approx) -> Approx:
    parts = ((x.value, other.value), (x.error, other.error))
    value, error = (np.concatenate(part, axis=1) for part in parts)
    return Approx(value, error)


def enter_streams(stored, x, others) -> dict[str, Approx]:
    n = others.shape[1] // x.shape[1]
    found = stored(_matched(_streams(others, n), _streams(x, 1))).reshape(*others.shape)
    return {"0": _side_by_side(exact(x), found)}


def predict_streams(stored, x, routed, weight) -> dict[str, Approx]:
    n = routed.shape[1]
    streams, matrix = _streams(x, n), _shares(routed, weight).reshape(len(x), n, n)
    y = streams + contract("tij,tjc->tic", matrix, streams, n + 1)
    return {"0": stored(y).reshape(*x.shape)}


def correct_streams(stored, x, activated, routed, weight, active) -> dict[str, Approx]:
    streams, n = _streams(x, routed.shape[1]), routed.shape[1]
    shares = (_shares(routed, weight) + 1.0).reshape(len(x), n, 1)
    new = (exact(activated) - streams[:, active]).reshape(len(x), 1, activated.shape[1])
    return {"0": stored(streams + new * shares).reshape(*x.shape)}


def add_to_streams(stored, x, delta) -> dict[str, Approx]:
    streams = _streams(x, x.shape[1] // delta.shape[1])
    y = stored(streams + _streams(delta, 1))
    y.value[:, 0], y.error[:, 0] = streams.value[:, 0], 0.0
    return {"0": y.reshape(*x.shape)}


def add_matched(stored, total, y, like) -> dict[str, Approx]:
    return {"0": stored(exact(total) + _matched(exact(y), exact(like)))}


def collapse_streams(stored, x, w, count) -> dict[str, Approx]:
    sums, mixes, width = [], [], x.shape[1] // count
    for row in exact(x).value:
        streams = exact(row)
        size = sqrt((streams * streams).mean() + w.norm_eps)
        normed = (streams / size).reshape(1, -1)
        made = contract("mk,tk->tm", exact(w.weight), normed, len(row))
        made = (made * exact(w.scale) + exact(w.base)).reshape(-1)
        shares = (sigmoid(made[:count]) + w.eps).reshape(1, count)
        sums.append(contract("ti,ic->tc", shares, streams.reshape(count, width), count))
        if len(w.weight) > count:
            results = (sigmoid(made[count : 2 * count]) * 2.0).reshape(1, count)
            matrix = _balanced(made[2 * count :].reshape(count, count), w)
            mixes.append(_side_by_side(results, matrix.reshape(1, count * count)))
    numbers = len(w.weight) - count
    if not numbers:
        return {"0": stored(join(sums, width)), "1": exact(np.zeros((len(x), 0)))}
    return {"0": stored(join(sums, width)), "1": join(mixes, numbers)}


def _balanced(matrix: Approx, w: HyperWeights) -> Approx:
    y = softmax(matrix) + w.eps
    for i in range(2 * w.rounds - 1):
        y = _transposed(y) if i % 2 == 0 else y
        y = y / (y.sum() + w.eps)
        y = _transposed(y) if i % 2 == 0 else y
    return y


def _transposed(x: Approx) -> Approx:
    return Approx(x.value.T, x.error.T)


def expand_streams(stored, x, delta, mix) -> dict[str, Approx]:
    n = x.shape[1] // delta.shape[1]
    weights = exact(mix)
    matrix = weights[:, n:].reshape(len(x), n, n)
    mixed = contract("tjk,tjc->tkc", matrix, _streams(x, n), n + 1)
    added = weights[:, :n].reshape(len(x), n, 1) * _streams(delta, 1)
    return {"0": stored(mixed + added).reshape(*x.shape)}
