"""Products of encoder blocks whose inputs and results stay within stored bounds (Gemma 4 E2B, E4B:
`Gemma4ClippableLinear` in transformers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.models.layers import Projection
from quire.models.maker import Maker
from quire.models.spec import Block, Mlp
from quire.models.vision.spec import BOUNDS, bounded_products
from quire.ops import LinearWeight, Ops
from quire.quantization import Role


class Bounds(NamedTuple):
    """The least and the largest input and output of a product, in the order of their leaves."""

    input_min: float
    input_max: float
    output_min: float
    output_max: float


@dataclass(frozen=True, slots=True)
class BoundedLinear:
    """Packed weights with bounds, of products of the same inputs, with outputs in order."""

    parts: tuple[tuple[LinearWeight, Bounds], ...]
    segments: int = 1

    @property
    def in_features(self) -> int:
        return self.parts[0][0].in_features

    @property
    def out_features(self) -> int:
        return sum(weight.out_features for weight, _ in self.parts)


class BoundedMaker(Maker):
    """Makes a block's products as `make` does, kept within their bounds, which are read first."""

    def __init__(self, make: Maker, at: str, block: Block) -> None:
        # one state with `make`: what is kept here has to be in its list of the encoder's parts
        vars(self).update(vars(make))
        assert self.adapters is None and self.group is None, "an encoder is in one piece"
        self._bounds = {
            name: Bounds(*(float(make.weights.tensor(f"{name}.{bound}")) for bound in BOUNDS))
            for name in bounded_products(at, block)
        }
        assert not isinstance(block.mlp, Mlp) or block.mlp.gated, "a part with gates"
        own = _Products(make.ops)
        self.ops = make.ops.replace(linear=own.linear, hidden=own.hidden)

    def linear(
        self,
        name: str,
        *leaves: str,
        role: Role = "projection",
        change: Callable[[Tensor], Tensor] | None = None,
        is_adaptable: bool = True,
        gated: bool = False,
    ) -> Any:
        sizes = self.weights.rows(*leaves)
        [(weight, bias, stored_as)] = self._products(role, leaves, change or torch.clone)
        assert isinstance(weight, Tensor) and bias is None, "plain weights without biases"
        parts = []
        for leaf, rows in zip(leaves, weight.split(sizes), strict=True):
            packed = self.ops.pack_linear(rows.contiguous(), None, stored_as)
            self.keep(leaf, packed)
            parts.append((packed, self._bounds[leaf]))
        return BoundedLinear(tuple(parts))

    def row_linear(
        self, name: str, units: int, change: Callable[[Tensor], Tensor] | None = None
    ) -> Projection:
        return partial(self.ops.linear, w=self.linear(name, name, change=change))


class _Products:
    """The ops of products; see quire.ops for each."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, x: Tensor, w: BoundedLinear, addend: Any = None) -> Tensor:
        assert addend is None, "encoders have no adapters"
        found = [self._within(x, weight, bounds) for weight, bounds in w.parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def hidden(
        self, x: Tensor, up: BoundedLinear, act: str, gated: bool, addend: Any = None
    ) -> Tensor:
        assert gated and addend is None, "a part with gates"
        gates, values = (self._within(x, weight, bounds) for weight, bounds in up.parts)
        return self._ops.modulate(gates, values, act)

    def _within(self, x: Tensor, weight: LinearWeight, b: Bounds) -> Tensor:
        y = self._ops.linear(x.clamp(b.input_min, b.input_max), weight)
        return y.clamp(b.output_min, b.output_max)
