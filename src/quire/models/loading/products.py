"""The products of a layer by name: what `offload_params` chooses among, and how large each is.

A product is a weight as the decoder multiplies with it: `attn.qkv`, `mlp.up` (with the gate),
`mlp.experts` (all of them). Leaves that become one weight have the name of that weight here. Free
of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.models.parameters import layer_parameters
from quire.models.spec import Decoder

_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}
"""A leaf -> the weight that it is a part of."""
_HAVE_GATES = ("attn", "inputs")
"""Parts of a layer with a `gate` that is a weight of its own."""
_WHOLE = ("mixer", "shared")
"""Parts of a layer whose weights have no names here: recurrences, uses of a shared transformer."""
_OTHER_NAMES = {
    "self_attn": "attn", "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv",
    "o_proj": "o", "gate_proj": "up", "up_proj": "up", "gate_up_proj": "up", "down_proj": "down",
    "w13_weight": "experts", "w2_weight": "experts", "w13": "experts", "w2": "experts",
}  # fmt: skip
"""Names of checkpoints and of other engines."""


def product_of(name: str) -> str:
    """A leaf's product: `layers.3.mlp.gate.weight` and `layers.3.mlp.up` are of `mlp.up`."""
    parts = name.split(".")[2:]
    if parts[-1] in ("weight", "bias"):
        parts.pop()
    if parts[0] in _WHOLE:
        return parts[0]
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts") + 1])
    if not (parts[-1] == "gate" and parts[0] in _HAVE_GATES):
        parts[-1] = _FUSED.get(parts[-1], parts[-1])
    return ".".join(parts)


def names_product(wanted: str, product: str) -> bool:
    """Whether `wanted`, whole segments of a name as `mlp.experts` or `down_proj`, names it."""
    asked = [_OTHER_NAMES.get(part, part) for part in wanted.removesuffix(".weight").split(".")]
    if asked[-2:] == ["experts", "experts"]:  # a part of what is one product here
        asked.pop()
    parts = product.split(".")
    return any(parts[i : i + len(asked)] == asked for i in range(len(parts)))


def is_chosen(product: str, wanted: Iterable[str]) -> bool:
    """Whether one of `wanted` names the product; every product where nothing is wanted."""
    wanted = tuple(wanted)
    return not wanted or any(names_product(name, product) for name in wanted)


def layer_products(decoder: Decoder) -> tuple[Mapping[str, int], ...]:
    """The products of each layer, and how many values their matrices have."""
    found: dict[object, Mapping[str, int]] = {}
    for layer, block in enumerate(decoder.blocks):
        if block not in found:  # mixtures have tens of thousands of leaves
            found[block] = _products(decoder, layer)
    return tuple(found[block] for block in decoder.blocks)


def _products(decoder: Decoder, layer: int) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for name, leaf in layer_parameters(decoder, layer).items():
        if leaf.kind == "matrix":
            sizes[product_of(name)] += leaf.size
    return dict(sizes)
