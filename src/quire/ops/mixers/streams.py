"""Several residual streams instead of one (alternating updates, Baykal et al. 2023; Gemma 3n): a
layer runs on one of n streams, and small learned matrices predict and correct the others.

Streams are side by side, x [T, n*C]. All sums are in fp32, and rounded where they are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.activation import moments
from quire.ops.registry import WIDE, op

LEAST_SQUARE = 1e-5
"""Of a vector whose magnitude is changed, in the mean."""

_STREAMS = "several residual streams"


@op(is_invariant=True, only_for=_STREAMS)
def join_streams(x: Tensor, other: Tensor) -> Tensor:
    """x [T, C] and other [T, D] of one dtype side by side -> [T, C + D] (Zamba2)."""
    return torch.cat((x, other), 1)


@op(is_invariant=True, only_for=_STREAMS)
def enter_streams(x: Tensor, others: Tensor) -> Tensor:
    """Streams of x [T, C] and of others [T, (n-1)*C], each with x's magnitude -> [T, n*C]."""
    wide = WIDE[x.dtype]
    streams = others.to(wide).unflatten(1, (-1, x.shape[1]))
    matched = _matched(streams, x.to(wide).unsqueeze(1))
    return torch.cat((x, matched.flatten(1).to(x.dtype)), 1)


@op(is_invariant=True, only_for=_STREAMS)
def predict_streams(x: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    """x [T, n*C] plus what a matrix per token makes of it -> [T, n*C]: entry (i, j) of the matrix
    is row i*n + j of weight [n*n, n] times tanh(routed [T, n]).
    """
    wide, n = WIDE[x.dtype], routed.shape[1]
    streams = x.to(wide).unflatten(1, (n, -1))
    matrix = _coefficients(routed, weight).unflatten(1, (n, n))
    y = streams.clone()
    for j in range(n):
        y += streams[:, j, None] * matrix[:, :, j, None]
    return y.flatten(1).to(x.dtype)


@op(is_invariant=True, only_for=_STREAMS)
def correct_streams(
    x: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> Tensor:
    """x [T, n*C] plus shares of how far `activated` [T, C] is from stream `active` -> [T, n*C]: the
    share of stream i is 1 + row i of weight [n, n] times tanh(routed [T, n]).
    """
    wide, n = WIDE[x.dtype], routed.shape[1]
    streams = x.to(wide).unflatten(1, (n, -1))
    innovation = activated.to(wide) - streams[:, active]
    shares = _coefficients(routed, weight) + 1.0
    y = streams + innovation.unsqueeze(1) * shares.unsqueeze(2)
    return y.flatten(1).to(x.dtype)


@op(is_invariant=True, only_for=_STREAMS)
def add_to_streams(x: Tensor, delta: Tensor) -> Tensor:
    """x [T, n*C] with delta [T, C] added to every stream but the first -> [T, n*C]."""
    streams = x.unflatten(1, (-1, delta.shape[1]))
    return torch.cat((streams[:, :1], streams[:, 1:] + delta.unsqueeze(1)), 1).flatten(1)


@op(is_invariant=True, only_for=_STREAMS)
def add_matched(total: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """total + y with the magnitude of `like`, all [T, C] -> [T, C]."""
    wide = WIDE[total.dtype]
    return (total.to(wide) + _matched(y.to(wide), like.to(wide))).to(total.dtype)


def _coefficients(routed: Tensor, weight: Tensor) -> Tensor:
    """weight [m, n] times tanh(routed [T, n]), one product after the other -> [T, m]."""
    wide = WIDE[routed.dtype]
    modalities, columns = routed.to(wide).tanh(), weight.to(wide).unbind(1)
    y = modalities[:, :1] * columns[0]
    for k in range(1, len(columns)):
        y = y + modalities[:, k, None] * columns[k]
    return y


def _matched(y: Tensor, like: Tensor) -> Tensor:
    """y [*, C] with the root mean square of like [*, C]."""
    least = _mean_square(y).clamp_min(LEAST_SQUARE)
    return y * (_mean_square(like).sqrt() / least.sqrt())


def _mean_square(x: Tensor) -> Tensor:
    """Of the last axis, [*, 1]."""
    mean, deviation = moments(x)
    return mean * mean + deviation * deviation
