"""Normalisation and the residual sum in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.registry import WIDE, op

NormKind = Literal["rms", "rms_late_cast", "rms1p", "layer", "layer1p", "none"]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """One norm's kind, epsilon and parameters, in the model's dtype.

    | kind          | what it computes                   | whose rounding                     |
    | ------------- | ---------------------------------- | ---------------------------------- |
    | rms           | x / rms(x), cast, times weight     | LlamaRMSNorm in transformers       |
    | rms_late_cast | x / rms(x) times weight, cast      | Olmo2RMSNorm, GptOssRMSNorm        |
    | rms1p         | x / rms(x) times 1 + weight, cast  | Gemma2RMSNorm                      |
    | layer         | layer norm, perhaps with bias      | torch.nn.LayerNorm, CohereLayerNorm |
    | layer1p       | layer norm with 1 + weight         | NemotronLayerNorm1P                |
    | none          | layer norm without parameters      | OlmoLayerNorm                      |

    weight and bias are [C], or [H, D] where every head has its own.
    """

    kind: NormKind
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.weight is None) == (self.kind == "none"), f"{self.kind} norm: weight"


@op(axes={"x": 0})
def norm(x: Tensor, n: NormWeight) -> Tensor:
    """Normalise the last axis of x [*, C] by `n` -> [*, C] in x's dtype; statistics in fp32.

    RMS: Zhang & Sennrich 2019; layer: Ba et al. 2016.
    """
    weight = n.weight
    if weight is None or n.kind in ("layer", "layer1p"):
        return _layer_norm(x, n)
    if n.kind == "rms":  # torch normalises in fp32 and rounds to x's dtype
        y = torch.rms_norm(x, x.shape[-1:], None, n.eps).mul_(weight)
    else:
        wide = WIDE[x.dtype]
        scale = weight.to(wide) + 1 if n.kind == "rms1p" else weight.to(wide)
        y = torch.rms_norm(x.to(wide), x.shape[-1:], None, n.eps).mul_(scale).to(x.dtype)
    return y if n.bias is None else y.add_(n.bias)


def _layer_norm(x: Tensor, n: NormWeight) -> Tensor:
    weight = n.weight
    if weight is not None and n.kind == "layer1p":
        weight = weight + 1
    if weight is None or weight.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], weight, n.bias, n.eps)
    wide = WIDE[x.dtype]
    y = F.layer_norm(x.to(wide), x.shape[-1:], None, None, n.eps).mul_(weight)
    return (y if n.bias is None else y.add_(n.bias)).to(x.dtype)


@op(axes={"x": 0, "delta": 0})
def add(x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
    """The residual sum x + scale * delta, both [T, C] of one dtype -> [T, C].

    The product is rounded before the sum, as `residual + delta * multiplier` in transformers
    (Granite).
    """
    return x + (delta if scale == 1.0 else delta * scale)


@op(axes={"x": 0}, is_invariant=True, only_for="scaled layers")
def multiply(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, C] times factors [C], or the one of [1], of the same dtype -> [T, C]."""
    return x * factors


@op(axes={"x": 0, "delta": 0})
def add_norm(x: Tensor, delta: Tensor, n: NormWeight, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(s, norm(s)) for s = x + scale * delta: a block's end and the next one's beginning, [T, C]
    each.
    """
    total = add(x, delta, scale)
    return total, norm(total, n)
