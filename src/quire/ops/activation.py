"""The non-linearities of feed-forward layers, and the gate on a layer's output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.registry import WIDE, op


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "relu2": _relu2,
    }
)
"""Name in a spec -> function; each returns a new tensor of x's dtype."""


_VECTORS = 64
"""Elements that torch computes with the same instructions: two vectors of 16, and twice as many for
other machines.
"""


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of x [T, F], which acts on each element, with the same bits for an element
    whatever the number of rows, and whatever part of a row there is. Torch takes rows that lie one
    after the other as one long row, and computes the last elements of a row, less than some
    vectors, with other instructions; and for dense tensors it may call another library. So the rows
    are laid apart, each is made longer, and there are always two.
    """
    width = x.shape[1]
    longer = -(-width // _VECTORS) * _VECTORS
    return function(F.pad(x, (0, longer - width + 1, 0, 1))[:, :longer])[:-1, :width]


def gated(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up for gate_up [*, 2F] that holds the gate, then the up half -> [*, F]."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[act](gate).mul_(up)


def gated_with_limit(
    gate_up: Tensor, limit: float, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """gpt-oss's form of the gate, [*, 2F] -> [*, F].

    (up + 1) * gate * sigmoid(1.702 * gate), gate cut at +limit and up at +-limit (GptOssExperts in
    transformers).
    """
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return up.add_(1).mul_(gate * sigmoid(gate * 1.702))


@op(axes={"gate_up": 0}, is_invariant=True, only_for="bounded activations")
def clamped_gated(gate_up: Tensor, limit: float) -> Tensor:
    """`gated_with_limit` of gate_up [T, 2F] -> [T, F], with the same bits for a row whatever the
    number of rows.
    """
    return gated_with_limit(gate_up, limit, partial(row_by_row, torch.sigmoid))


@op(axes={"gate_up": 0}, is_invariant=True, only_for="bounded activations")
def bounded_gated(gate_up: Tensor, act: str, bound: float) -> Tensor:
    """`gated` with act(gate) at most `bound` and up within +-bound: gate_up [*, 2F] -> [*, F]
    (Step-3.5).
    """
    gate, up = gate_up.flatten(0, -2).chunk(2, 1)
    opened = row_by_row(ACTIVATIONS[act], gate).clamp_(max=bound).mul_(up.clamp(-bound, bound))
    return opened.view(*gate_up.shape[:-1], gate.shape[1])


@op(axes={"gate_up": 0}, is_invariant=True, only_for="sparse activations")
def sparse_gated(gate_up: Tensor, act: str, deviations: float) -> Tensor:
    """`gated` for gates [T, F] that are cut at their mean plus so many standard deviations, and
    less that: gate_up [T, 2F] -> [T, F]. Statistics are in fp32 (Gemma 3n).
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.to(WIDE[gate.dtype])
    mean, deviation = moments(wide)
    sparse = F.relu(wide - (mean + deviation * deviations)).to(gate.dtype)
    return row_by_row(ACTIVATIONS[act], sparse).mul_(up)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the last axis of x, [*, 1] each, by the kernel of layer norms:
    it adds each row in the same order whatever the number of rows.
    """
    _, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], None, None, 0.0)
    return mean, 1.0 / inverse


@op(axes={"x": 0}, is_invariant=True)
def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """The activation of Huang & Schlag 2024 with learned numbers [4] = (p, n, b, e), x [T, F] ->
    [T, F].

    softplus(p) x^2 + b x above 0, (b + softplus(n)) (exp(min(x, e)) - 1 - x) + b x below; in fp32
    (XIELUActivation in transformers).
    """
    wide = WIDE[x.dtype]
    y, (p, n, beta, eps) = x.to(wide), numbers.to(wide)
    above = F.softplus(p) * y * y
    below = (row_by_row(torch.expm1, torch.minimum(y, eps)) - y) * (beta + F.softplus(n))
    return torch.where(y > 0, above, below).add_(beta * y).to(x.dtype)


@op(axes={"x": 0, "by": 0}, is_invariant=True, only_for="vectors for each layer")
def modulate(x: Tensor, by: Tensor, act: str) -> Tensor:
    """act(x) * by, both [T, F] of one dtype -> [T, F]; `act` is a name in `ACTIVATIONS`."""
    return row_by_row(ACTIVATIONS[act], x) * by


@op(axes={"y": 0, "gate": 0}, is_invariant=True, only_for="gates of heads")
def scale_heads(y: Tensor, gate: Tensor) -> Tensor:
    """y [T, H*D] with each head times sigmoid of its gate [T, H] -> [T, H*D]."""
    heads = y.unflatten(1, (gate.shape[1], -1))
    return (heads * row_by_row(torch.sigmoid, gate).unsqueeze(2)).flatten(1)


@op(axes={"y": 0, "gate": 0})
def scale_gate(y: Tensor, gate: Tensor) -> Tensor:
    """y * sigmoid(gate): y [T, F], gate [T, F] or [T, 1] -> [T, F] in y's dtype."""
    return y * gate.sigmoid()
