"""A linear layer of a model of transformers whose weight is in codes, before it is packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
