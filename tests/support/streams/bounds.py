"""Bounds of the ops of several residual streams; see op_bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from tests.support.running_error import Approx, Stored, contract, sqrt, tanh

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


def _join_streams(stored: Stored, x: Tensor, other: Tensor) -> dict[str, Approx]:
    return {"0": _side_by_side(exact(x), exact(other))}


def _side_by_side(x: Approx, other: Approx) -> Approx:
    parts = ((x.value, other.value), (x.error, other.error))
    value, error = (np.concatenate(part, axis=1) for part in parts)
    return Approx(value, error)


def _enter_streams(stored: Stored, x: Tensor, others: Tensor) -> dict[str, Approx]:
    n = others.shape[1] // x.shape[1]
    found = stored(_matched(_streams(others, n), _streams(x, 1))).reshape(*others.shape)
    return {"0": _side_by_side(exact(x), found)}


def _predict_streams(
    stored: Stored, x: Tensor, routed: Tensor, weight: Tensor
) -> dict[str, Approx]:
    n = routed.shape[1]
    streams, matrix = _streams(x, n), _shares(routed, weight).reshape(len(x), n, n)
    y = streams + contract("tij,tjc->tic", matrix, streams, n + 1)
    return {"0": stored(y).reshape(*x.shape)}


def _correct_streams(
    stored: Stored, x: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> dict[str, Approx]:
    streams, n = _streams(x, routed.shape[1]), routed.shape[1]
    shares = (_shares(routed, weight) + 1.0).reshape(len(x), n, 1)
    new = (exact(activated) - streams[:, active]).reshape(len(x), 1, activated.shape[1])
    return {"0": stored(streams + new * shares).reshape(*x.shape)}


def _add_to_streams(stored: Stored, x: Tensor, delta: Tensor) -> dict[str, Approx]:
    streams = _streams(x, x.shape[1] // delta.shape[1])
    y = stored(streams + _streams(delta, 1))
    y.value[:, 0], y.error[:, 0] = streams.value[:, 0], 0.0
    return {"0": y.reshape(*x.shape)}


def _add_matched(stored: Stored, total: Tensor, y: Tensor, like: Tensor) -> dict[str, Approx]:
    return {"0": stored(exact(total) + _matched(exact(y), exact(like)))}


BOUNDS: dict[str, Callable[..., dict[str, Approx]]] = {
    "join_streams": _join_streams,
    "enter_streams": _enter_streams,
    "predict_streams": _predict_streams,
    "correct_streams": _correct_streams,
    "add_to_streams": _add_to_streams,
    "add_matched": _add_matched,
}
