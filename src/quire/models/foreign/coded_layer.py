"""Linear layers and experts of transformers whose weights are in codes, before packing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.models.foreign.experts import SeparateProducts
from quire.models.foreign.spec import ForeignExperts
from quire.ops import CodedWeight
from quire.ops.linear import pack_linear


class CodedLinearLayer(nn.Module):
    """A linear layer in codes before it is packed: it multiplies as plain torch does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(0)  # for code of transformers that draws weights by itself
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        self.codes: CodedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out]."""
        assert self.codes is not None, "weights are read before they are used"
        plain = pack_linear(self.codes, self.bias)
        y: Tensor = plain.multiply(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


class CodedExpertsLayer(SeparateProducts):
    """Experts in codes before they are packed: they multiply as plain torch does."""

    def __init__(self, experts: Any, sizes: ForeignExperts) -> None:
        super().__init__()
        self.act = experts._apply_gate if sizes.is_gated else experts.act_fn
        self.up = [[] for _ in range(sizes.count)]
        self.down = []

    def multiply(self, x: Tensor, weight: CodedWeight | Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return pack_linear(weight, None).multiply(x)
