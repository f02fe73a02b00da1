"""Linear layers and experts of a model of transformers whose weights are in codes, before they are
packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


class CodedExpertsLayer(nn.Module):
    """Experts in codes before they are packed: they multiply as plain torch does. `up` and `down`
    have the weights of each expert: those of its gate and of its inputs, or of its inputs alone,
    and that of its outputs.
    """

    def __init__(self, experts: Any, sizes: ForeignExperts) -> None:
        super().__init__()
        self.act = experts._apply_gate if sizes.is_gated else experts.act_fn
        self.up: list[list[CodedWeight | Tensor]] = [[] for _ in range(sizes.count)]
        self.down: list[CodedWeight | Tensor] = []

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, C], the chosen experts and their weights [T, k] -> [T, C]."""
        total = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            # what transformers gives to experts of other devices
            if number >= len(self.up):
                continue
            tokens, places = torch.where(chosen == number)
            x = hidden[tokens]
            inner = self.act(
                torch.cat([pack_linear(w, None).multiply(x) for w in self.up[number]], 1)
            )
            result = pack_linear(self.down[number], None).multiply(inner)
            result = result * weights[tokens, places, None]
            total.index_add_(0, tokens, result.to(total.dtype))
        return total
