"""Recipes: the weight format of each role that a weight can have in a decoder.

Loss of the embedded model on its 17 held-out files (32 windows of 1,024 tokens; 3.4196 nats per
token in bfloat16), with int8 activations where weights are rounded:

| projections | head | difference to bfloat16 |
| --- | --- | --- |
| int8 | bfloat16 | +0.002 % |
| int8 | int8 | +0.003 % |
| int4, group 32 | bfloat16 | +0.38 % |
| int4, group 64 | bfloat16 | +0.49 % |
| int4, group 128 | bfloat16 | +0.47 % |
| int4, group 32 | int8 | +0.38 % |
| int4, group 64 | int8 | +0.50 % |
| int4, group 32 | int4 | +0.66 % |

So the head is int8 in both recipes: that costs nothing that can be measured and halves what is
often the largest matrix, while int4 there costs almost as much as in all layers together. Groups of
32 take 4.5 bits per weight, 64 take 4.25; the smaller group keeps an outlier to fewer neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from quire.ops import WeightFormat

Role = Literal["projection", "head", "router"]
"""What a weight is for. Embedding tables, norms and biases have no role: they are never rounded."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the weights of a model are stored; None keeps the model's dtype.

    projections: those of attention, feed-forward layers and experts. Routers are never rounded:
    they are small, and a rounded score may choose another expert.
    """

    projections: WeightFormat | None
    head: WeightFormat | None

    def format_of(self, role: Role) -> WeightFormat | None:
        """The format of a weight with this role."""
        formats = {"projection": self.projections, "head": self.head, "router": None}
        return formats[role]


UNQUANTIZED = Recipe(projections=None, head=None)
"""Every weight in the model's dtype."""

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "int8": Recipe(projections=WeightFormat("int8"), head=WeightFormat("int8")),
        "int4": Recipe(projections=WeightFormat("int4", group=32), head=WeightFormat("int8")),
    }
)
"""Value of `--quantization` -> recipe."""
