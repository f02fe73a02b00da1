"""Products that are computed apart though the decoder has them as one (q, k and v; gate and up):
their weights are stored in ways that one product does not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.ops import LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class SeparateLinear:
    """Packed weights with the same inputs, whose outputs follow each other."""

    parts: tuple[LinearWeight, ...]
    segments: int = 1

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


class _Products:
    """The ops of products; see quire.ops for each."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, x: Tensor, w: Any, addend: Any = None) -> Tensor:
        if not isinstance(w, SeparateLinear):
            return self._ops.linear(x, w, addend)
        assert addend is None, "adapters of separate products are refused"
        joined, *others = (self._ops.linear(x, part) for part in w.parts)
        for other in others:
            joined = self._ops.join_streams(joined, other)
        return joined

    def hidden(self, x: Tensor, up: Any, act: str, gated: bool, addend: Any = None) -> Tensor:
        if not isinstance(up, SeparateLinear):
            return self._ops.hidden(x, up, act, gated, addend)
        assert gated and addend is None, "a hidden layer without gates is one product"
        gates, values = (self._ops.linear(x, part) for part in up.parts)
        return self._ops.modulate(gates, values, act)


def with_separate_products(ops: Ops) -> Ops:
    """`ops` that take weights of separate products, too."""
    own = _Products(ops)
    return ops.replace(linear=own.linear, hidden=own.hidden)
