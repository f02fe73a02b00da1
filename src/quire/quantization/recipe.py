"""Recipes: the weight format of each role that a weight can have in a decoder.

Loss of the embedded model on its 17 held-out files (36 windows of 1,024 tokens; 2.9516 nats per
token in bfloat16), with int8 activations (fp8 ones with fp8 weights) unless the recipe is
weight-only:

| projections | head | difference to bfloat16 |
| --- | --- | --- |
| int8 | bfloat16 | +0.014 % |
| int8 | int8 | +0.024 % |
| int8, weight-only | int8, weight-only | +0.016 % |
| int4, group 32 | int8 | +0.616 % |
| int4, group 64 | int8 | +0.886 % |
| int4, group 128 | int8 | +0.937 % |
| int4, group 32, weight-only | int8, weight-only | +0.613 % |
| fp8 (plain torch) | bfloat16 | +0.195 % |
| fp8 (plain torch) | fp8 | +0.261 % |

So the head has eight bits in all recipes: that costs little and halves what is often the largest
matrix. (For an earlier model of the same shape int4 there cost almost as much as in all layers
together.) Groups of 32 take 4.5 bits per weight, 64 take 4.25; the smaller group keeps an outlier
to fewer neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from quire.ops import WeightFormat

Role = Literal["projection", "expert", "head", "router"]
"""Use of a weight. Embedding tables, norms and biases have no role: they are never rounded."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Storage of a model's weights; None keeps the model's dtype.

    projections: those of attention, feed-forward layers and experts. Routers are never rounded:
    they are small, and a rounded score may choose another expert. choose: the format of a leaf of
    the decoder, which is the weight of a module of that name in the checkpoint, where it is up to
    these; own: what it has chosen, by the leaf's name without `.weight`.
    """

    projections: WeightFormat | None
    head: WeightFormat | None
    choose: Callable[[str, str], WeightFormat | None] | None = None
    own: Mapping[str, WeightFormat | None] = field(default_factory=dict)

    def format_of(self, role: Role, leaf: str | None = None) -> WeightFormat | None:
        """The format of a weight with this role, or of the weight of this leaf."""
        if role == "router":
            return None
        if leaf is not None and leaf in self.own:
            return self.own[leaf]
        return self.head if role == "head" else self.projections

    def for_modules(self, modules: Mapping[str, str]) -> Recipe:
        """The recipe with the formats of these leaves (`layers.0.attn.q.weight`), which are the
        weights of modules of these names.
        """
        if self.choose is None:
            return self
        own = {
            leaf.removesuffix(".weight"): self.choose(leaf, module)
            for leaf, module in modules.items()
            if leaf.endswith(".weight")
        }
        return replace(self, own=own)

    @property
    def group(self) -> int:
        """The largest number of inputs with one scale, 0 where all of them have one."""
        formats = (self.projections, *self.own.values())
        return max(0 if each is None else each.group for each in formats)


UNQUANTIZED = Recipe(projections=None, head=None)
"""Every weight in the model's dtype."""

_BYTES = WeightFormat("int8")
_FLOATS = WeightFormat("fp8")
_KEPT_ROWS = WeightFormat("int8", rounds_rows=False)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "fp8": Recipe(projections=_FLOATS, head=_FLOATS),
        "int8": Recipe(projections=_BYTES, head=_BYTES),
        "int8_weight_only": Recipe(projections=_KEPT_ROWS, head=_KEPT_ROWS),
        "int4": Recipe(projections=WeightFormat("int4", 32), head=_BYTES),
        "int4_g64": Recipe(projections=WeightFormat("int4", 64), head=_BYTES),
        "int4_g128": Recipe(projections=WeightFormat("int4", 128), head=_BYTES),
        "int4_weight_only": Recipe(
            projections=WeightFormat("int4", 32, rounds_rows=False), head=_KEPT_ROWS
        ),
    }
)
"""Value of `--quantization` -> recipe; models/formats/rounding_rules.py knows their bits."""
