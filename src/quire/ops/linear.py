"""Matrix products with weights: packing at load, projections, feed-forward layers, logits.

They share the format "linear" with the ops of experts (moe.py) and with those of workers that have
a part of the inputs (collective.py): the provider that packs a weight also multiplies with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import ACTIVATIONS, gated
from quire.ops.formats.coded import CodedLinear, CodedWeight, integer_linear, nibble_linear
from quire.ops.fp8 import Fp8Linear, fp8_weight
from quire.ops.quantized import QuantizedLinear, WeightFormat, quantize_weight
from quire.ops.registry import WIDE, op
from quire.ops.segments import Addend, add_to_rows, products


class LinearWeight(Protocol):
    """A packed weight, opaque to all but the provider that packed it."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def segments(self) -> int: ...


@runtime_checkable
class SharedOutputs(LinearWeight, Protocol):
    """A weight whose outputs several workers may compute a part of each, with the bits of all."""

    def share(self, rank: int, size: int) -> LinearWeight | None:
        """The part of one of `size` workers, in the memory of this weight; None: it has no equal
        parts.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Plain torch's format: weight [out, in] as in the checkpoint, bias [out] or None."""

    weight: Tensor
    bias: Tensor | None
    segments: int = 1

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out]. torch adds in an order of its own, whatever the segments are."""
        return add_to_rows(F.linear(x, self.weight, self.bias), x, self, addend)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> fp32 [T, S, out]."""
        wide = WIDE[x.dtype]
        return products(x.to(wide), self.weight.to(wide), self.segments)

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] plus bias."""
        return total if self.bias is None else total + self.bias


Plain = PlainLinear | QuantizedLinear | Fp8Linear | CodedLinear


@op(format="linear")
def pack_linear(
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    stored_as: WeightFormat | None = None,
    segments: int = 1,
    peaks: Tensor | None = None,
    gated: bool = False,
) -> Plain:
    """Take weight [out, in] and bias [out] into the provider's format, once at load.

    `stored_as` rounds the weight; None keeps its values, as one of codes always does. `segments`:
    of the inputs, see `quire.ops.segments`. `peaks` [out] fp32: the largest magnitude of each
    output's weights, where these are only some of them (`row_peaks`); the scales of int8 and fp8
    come from it. `gated`: gate rows and as many rows that they are multiplied with, for `hidden`
    with `gated` alone; a provider may lay them out for that. Plain torch keeps the caller's tensors
    where nothing is rounded (no copy), so that a weight may stay a view of a mapped file.
    """
    assert len(weight.shape) == 2 and (bias is None or bias.shape == weight.shape[:1])
    if isinstance(weight, CodedWeight):
        assert stored_as is None, "codes are not rounded again"
        if weight.is_of_integers:
            return integer_linear(weight, bias, segments)
        if (nibbles := weight.as_nibbles()) is not None:
            return nibble_linear(nibbles, bias, segments)
        return CodedLinear(weight, bias, segments)
    if stored_as is not None and stored_as.name == "fp8":
        return fp8_weight(weight, bias, segments, peaks)
    if stored_as is not None:
        return quantize_weight(weight, bias, stored_as, segments, peaks)
    return PlainLinear(weight, bias, segments)


@op(axes={"x": 0}, format="linear")
def linear(x: Tensor, w: Plain, addend: Addend | None = None) -> Tensor:
    """x [T, in] times the weight, plus bias and addend -> [T, out] in x's dtype, which is the
    weight's.
    """
    return w.multiply(x, addend)


@op(axes={"x": 0}, format="linear")
def hidden(x: Tensor, up: Plain, act: str, gated: bool, addend: Addend | None = None) -> Tensor:
    """The hidden layer of a feed-forward part, x [T, C] -> [T, F].

    gated: `up` is [2F, C], gate rows first, packed as gated, and the hidden layer is act(gate) *
    up; else it is act(up). `act` is a name in `ACTIVATIONS`. addend: of all outputs of `up`.
    """
    return _hidden(up.multiply(x, addend), act, gated)


def _hidden(h: Tensor, act: str, is_gated: bool) -> Tensor:
    return gated(h, act) if is_gated else ACTIVATIONS[act](h)


@op(axes={"x": 0}, format="linear")
def logits(
    x: Tensor,
    head: Plain,
    scale: float = 1.0,
    softcap: float | None = None,
    addend: Addend | None = None,
) -> Tensor:
    """The vocabulary's scores for x [R, C] -> fp32 [R, V]: softcap * tanh(scale * (x @ head) /
    softcap).

    The product is rounded to x's dtype before it is widened, as transformers does, so that ties in
    bf16 are the same; scale and cap are applied in fp32.
    """
    y = head.multiply(x, addend).to(WIDE[x.dtype])
    if scale != 1.0:
        y = y.mul_(scale)
    if softcap is not None:
        y = y.div_(softcap).tanh_().mul_(softcap)
    return y
