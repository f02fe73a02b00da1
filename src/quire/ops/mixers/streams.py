"""Several residual streams instead of one. Of alternating updates (Baykal et al. 2023; Gemma 3n) a
layer runs on one of n streams, and small learned matrices predict and correct the others. Of
hyper-connections (Xie et al. 2026; DeepSeek-V4) a part reads a weighed sum of all streams, and adds
its result to each of them after a matrix has mixed them.

Streams are side by side, x [T, n*C]. All sums are in fp32, and rounded where they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.activation import moments
from quire.ops.registry import WIDE, op

LEAST_SQUARE = 1e-5
"""Least mean square of a vector whose magnitude is changed."""

_STREAMS = "several residual streams"


@op(axes={"x": 0, "other": 0}, is_invariant=True, only_for=_STREAMS)
def join_streams(x: Tensor, other: Tensor) -> Tensor:
    """x [T, C] and other [T, D] of one dtype side by side -> [T, C + D] (Zamba2)."""
    return torch.cat((x, other), 1)


@op(axes={"x": 0, "others": 0}, is_invariant=True, only_for=_STREAMS)
def enter_streams(x: Tensor, others: Tensor) -> Tensor:
    """Streams of x [T, C] and of others [T, (n-1)*C], each with x's magnitude -> [T, n*C]."""
    wide = WIDE[x.dtype]
    streams = others.to(wide).unflatten(1, (-1, x.shape[1]))
    matched = _matched(streams, x.to(wide).unsqueeze(1))
    return torch.cat((x, matched.flatten(1).to(x.dtype)), 1)


@op(axes={"x": 0, "routed": 0}, is_invariant=True, only_for=_STREAMS)
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


@op(axes={"x": 0, "activated": 0, "routed": 0}, is_invariant=True, only_for=_STREAMS)
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


@op(axes={"x": 0, "delta": 0}, is_invariant=True, only_for=_STREAMS)
def add_to_streams(x: Tensor, delta: Tensor) -> Tensor:
    """x [T, n*C] with delta [T, C] added to every stream but the first -> [T, n*C]."""
    streams = x.unflatten(1, (-1, delta.shape[1]))
    return torch.cat((streams[:, :1], streams[:, 1:] + delta.unsqueeze(1)), 1).flatten(1)


@op(axes={"total": 0, "y": 0, "like": 0}, is_invariant=True, only_for=_STREAMS)
def add_matched(total: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """total + y with the magnitude of `like`, all [T, C] -> [T, C]."""
    wide = WIDE[total.dtype]
    return (total.to(wide) + _matched(y.to(wide), like.to(wide))).to(total.dtype)


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Source of the weights of n streams of C numbers: x / rms(x), times `weight` [m,
    n*C] fp32, times `scale` and plus `base` [m] fp32 each. The first n numbers are those of a sum,
    and where there are more, n of a result and n*n of a matrix follow.

    `eps` joins the weights and the divisors of a matrix, whose columns and rows are divided by
    their sums `rounds` times in turn (Sinkhorn and Knopp 1967).
    """

    weight: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    rounds: int


@op(axes={"x": 0}, is_invariant=True, only_for=_STREAMS)
def collapse_streams(x: Tensor, w: HyperWeights, count: int) -> tuple[Tensor, Tensor]:
    """x [T, n*C] of `count` n streams -> their weighed sum [T, C], and as `expand_streams` takes
    them the weights of a result and of the matrix [T, n + n*n] fp32, or nothing [T, 0].
    """
    total = x.new_empty(len(x), x.shape[1] // count)
    mixes = torch.empty(len(x), len(w.weight) - count, dtype=WIDE[x.dtype], device=x.device)
    for t, row in enumerate(x.to(WIDE[x.dtype])):  # one by one: all numbers in the same order
        inverse = (row.square().mean() + w.norm_eps).rsqrt()
        numbers = (w.weight.to(row.dtype) @ (row * inverse)) * w.scale + w.base
        shares = numbers[:count].sigmoid() + w.eps
        total[t] = (shares[:, None] * row.view(count, -1)).sum(0)
        if len(numbers) > count:
            mixes[t, :count] = 2 * numbers[count : 2 * count].sigmoid()
            mixes[t, count:] = _balanced(numbers[2 * count :].view(count, count), w).flatten()
    return total, mixes


def _balanced(matrix: Tensor, w: HyperWeights) -> Tensor:
    """The matrix [n, n] as positive numbers whose rows and columns have sums near one."""
    y = matrix.softmax(1) + w.eps
    y = y / (y.sum(0, keepdim=True) + w.eps)
    for _ in range(w.rounds - 1):
        y = y / (y.sum(1, keepdim=True) + w.eps)
        y = y / (y.sum(0, keepdim=True) + w.eps)
    return y


@op(axes={"x": 0, "delta": 0, "mix": 0}, is_invariant=True, only_for=_STREAMS)
def expand_streams(x: Tensor, delta: Tensor, mix: Tensor) -> Tensor:
    """Streams after a part whose result is delta [T, C]: stream k of x [T, n*C] is the sum over j
    of entry (j, k) of the token's matrix times stream j, plus weight k times delta -> [T, n*C]. mix
    [T, n + n*n] fp32.
    """
    wide, n = WIDE[x.dtype], x.shape[1] // delta.shape[1]
    streams, mix = x.to(wide).unflatten(1, (n, -1)), mix.to(wide)
    matrix = mix[:, n:].unflatten(1, (n, n))
    y = mix[:, :n, None] * delta.to(wide).unsqueeze(1)
    for j in range(n):
        y += matrix[:, j, :, None] * streams[:, j, None]
    return y.flatten(1).to(x.dtype)


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
    """The mean of the squares over the last axis, [*, 1]."""
    mean, deviation = moments(x)
    return mean * mean + deviation * deviation
