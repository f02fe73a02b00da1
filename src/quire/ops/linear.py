"""Matrix products with weights: packing at load, projections, feed-forward layers, logits.

They share the format "linear" with the ops of experts (moe.py): the provider that packs a weight
also multiplies with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import ACTIVATIONS, gated
from quire.ops.fp8 import Fp8Linear, fp8_weight
from quire.ops.quantized import QuantizedLinear, WeightFormat, quantize_weight
from quire.ops.registry import WIDE, op


class LinearWeight(Protocol):
    """A packed weight, opaque to all but the provider that packed it."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Plain torch's format: weight [out, in] as in the checkpoint, bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out]."""
        return F.linear(x, self.weight, self.bias)


Plain = PlainLinear | QuantizedLinear | Fp8Linear


@op(format="linear")
def pack_linear(
    weight: Tensor, bias: Tensor | None, stored_as: WeightFormat | None = None
) -> Plain:
    """Take weight [out, in] and bias [out] into the provider's format, once at load.

    `stored_as` rounds the weight; None keeps its values. Plain torch then keeps the caller's
    tensors (no copy), so that a weight may stay a view of a mapped file.
    """
    assert weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    if stored_as is not None and stored_as.name == "fp8":
        return fp8_weight(weight, bias)
    if stored_as is not None:
        return quantize_weight(weight, bias, stored_as)
    return PlainLinear(weight, bias)


@op(format="linear")
def linear(x: Tensor, w: Plain) -> Tensor:
    """x [T, in] times the weight, plus bias -> [T, out] in x's dtype, which is the weight's."""
    return w.multiply(x)


@op(format="linear")
def mlp(x: Tensor, up: Plain, down: Plain, act: str, gated: bool) -> Tensor:
    """A feed-forward layer, x [T, C] -> [T, C].

    gated: `up` is [2F, C], gate rows first, and the hidden layer is act(gate) * up; else it is
    act(up). `act` is a name in `ACTIVATIONS`.
    """
    return down.multiply(_hidden(up.multiply(x), act, gated))


def _hidden(h: Tensor, act: str, is_gated: bool) -> Tensor:
    return gated(h, act) if is_gated else ACTIVATIONS[act](h)


@op(format="linear")
def logits(x: Tensor, head: Plain, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """The vocabulary's scores for x [R, C] -> fp32 [R, V]: softcap * tanh(scale * (x @ head) /
    softcap).

    The product is rounded to x's dtype before it is widened, as transformers does, so that ties in
    bf16 are the same; scale and cap are applied in fp32.
    """
    y = head.multiply(x).to(WIDE[x.dtype])
    if scale != 1.0:
        y = y.mul_(scale)
    if softcap is not None:
        y = y.div_(softcap).tanh_().mul_(softcap)
    return y
