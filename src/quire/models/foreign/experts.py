"""Experts of a mixture of transformers, one product after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SeparateProducts(nn.Module):
    """Experts whose weights are apart from each other: a token adds what its experts give in the
    order of their numbers. `up` and `down` have the weights of each expert: those of its gate and
    of its inputs, or of one product for both, and that of its outputs.
    """

    act: Callable[[Tensor], Tensor]
    up: list[list[Any]]
    down: list[Any]

    def multiply(self, x: Tensor, weight: Any) -> Tensor:
        """x [T, in] -> [T, out]."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, C], the chosen experts and their weights [T, k] -> [T, C]."""
        total = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            # what transformers gives to experts of other devices
            if number >= len(self.up):
                continue
            tokens, places = torch.where(chosen == number)
            x = hidden[tokens]
            parts = [self.multiply(x, weight) for weight in self.up[number]]
            inner = self.act(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
            result = self.multiply(inner, self.down[number]) * weights[tokens, places, None]
            total.index_add_(0, tokens, result.to(total.dtype))
        return total
