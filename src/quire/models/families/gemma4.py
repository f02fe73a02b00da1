"""Gemma 4, text: other heads in full layers than in sliding ones, norms of values, layers that
share keys and values, inputs and a factor of each layer; with experts next to the dense part.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.gemma import capped, gemma_attention
from quire.models.families.gemma3n import (
    SHARING_RULES,
    UNUSED_TENSORS,
    activation_of,
    layer_inputs_of,
    num_sharing_of,
    with_sharing,
)
from quire.models.families.llama import (
    LAYER,
    context_of,
    layer_rules,
    norm_rules,
    num_experts_of,
    num_layers_of,
    read_layer_types,
    rms,
    stack,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import stacked_expert_rules
from quire.models.positions import ProportionalScaling, Rope
from quire.models.rope_config import SCALINGS, rope_from
from quire.models.rules import Family, rule
from quire.models.spec import (
    Block,
    Decoder,
    DenseAndExperts,
    FeedForward,
    LayerInputs,
    Mlp,
    Moe,
    Norm,
)

_MLP = "layers.{layer}.mlp."
_RULES = (
    *SHARING_RULES,
    *layer_rules({f"mlp.{part}_proj": f"mlp.dense.{part}" for part in ("gate", "up", "down")}),
    *norm_rules(
        **{
            "mlp.dense_pre": "pre_feedforward_layernorm",
            "mlp.dense_post": "post_feedforward_layernorm_1",
            "mlp.experts_pre": "pre_feedforward_layernorm_2",
            "mlp.experts_post": "post_feedforward_layernorm_2",
            "mlp.router": "router.proj",
        }
    ),
    rule(LAYER + "router.scale", _MLP + "router_norm.weight"),
    rule(LAYER + "router.per_expert_scale", _MLP + "expert_scales"),
    *stacked_expert_rules("experts"),
    rule(LAYER + "layer_scalar", "layers.{layer}.scale"),
)


def _describe(c: ConfigReader) -> Decoder:
    c.only("use_bidirectional_attention", False, "vision")  # pictures see themselves whole
    kinds, norm = _layer_types(c), rms(c, 1e-6, "rms_late_cast")
    inputs, shared = _layer_inputs(c, norm), num_sharing_of(c, 0)
    feeds = _feeds(c, norm, shared)
    blocks = [
        Block(
            mixer=None,
            mlp=feed,
            norm=norm,
            post=True,
            input_act=None if inputs is None else activation_of(c),
            scaled=True,
        )
        for feed in feeds
    ]
    blocks = with_sharing(_with_attention(c, blocks, kinds, norm), kinds, shared)
    return stack(c, blocks, layer_inputs=inputs, **capped(c, None))


def _layer_inputs(c: ConfigReader, norm: Norm) -> LayerInputs | None:
    """Pictures and sounds have those of the padding."""
    inputs = layer_inputs_of(c, norm)
    if inputs is None:
        return None
    return replace(inputs, media_id=c.integer("pad_token_id", 0, minimum=0))


def _layer_types(c: ConfigReader) -> list[str]:
    """The last layer sees everything, whatever the config says."""
    return [*read_layer_types(c, lambda layer: layer % 6 != 5)[:-1], "full_attention"]


def _with_attention(
    c: ConfigReader, blocks: list[Block], kinds: list[str], norm: Norm
) -> list[Block]:
    keys_only, shapes, ropes = c.flag("attention_k_eq_v", False), _shapes(c, kinds), _Ropes(c)
    c.only("use_bidirectional_attention", None, False, "vision")
    window = window_of(c, 512)
    found = []
    for block, kind, (dim, kv_heads) in zip(blocks, kinds, shapes, strict=True):
        attn = gemma_attention(
            c,
            dim,
            kv_heads=kv_heads,
            scale=1.0,
            rope=ropes.of(kind, dim),
            qk_norm=norm,
            value_norm=True,
            values_are_keys=keys_only and kind == "full_attention",
            ignores_spans=kind == "full_attention",
        )
        found += with_windows(replace(block, mixer=attn), [kind], window)
    return found


def _shapes(c: ConfigReader, kinds: list[str]) -> list[tuple[int, int]]:
    """The width of a head and the number of key/value heads of each layer. transformers 5 writes
    what differs layer by layer, the published files name those of full layers.
    """
    dim, kv_heads = c.integer("head_dim", 256), c.integer("num_key_value_heads", 4)
    wide = c.integer("global_head_dim", 512)
    few = c.integer("num_global_key_value_heads", None)
    if few is None or not c.flag("attention_k_eq_v", False):
        few = kv_heads
    layers = c.section("per_layer_config")
    if layers is None:
        shapes = [(wide, few) if kind == "full_attention" else (dim, kv_heads) for kind in kinds]
    else:
        shapes = [_own_shape(layers, i, dim, kv_heads) for i in range(len(kinds))]
    heads = c.integer("num_attention_heads")
    for _, count in shapes:
        if heads % count:
            raise unsupported("num_global_key_value_heads", count, f"a divisor of {heads} heads")
    return shapes


def _own_shape(layers: ConfigReader, layer: int, dim: int, kv_heads: int) -> tuple[int, int]:
    # transformers pads the numbers, so that they sort
    names = layers.keys()
    name = next((key for key in names if key.isdecimal() and int(key) == layer), "")
    own = layers.section(name) if name else None
    if own is None:
        return dim, kv_heads
    return own.integer("head_dim", dim), own.integer("num_key_value_heads", kv_heads)


class _Ropes:
    """The rotations by layer type and width of a head."""

    def __init__(self, c: ConfigReader) -> None:
        self._c, self._parameters = c, c.section("rope_parameters")

    def of(self, kind: str, dim: int) -> Rope:
        if self._parameters is None:
            scaling = ProportionalScaling(dim // 8)
            return Rope(1e6, dim, scaling) if kind == "full_attention" else Rope(1e4, dim)
        section = self._parameters.section(kind)
        kinds = (*SCALINGS, "proportional")
        return rope_from(section, dim, 1e4, 1.0, context_of(self._c), kinds, None)


def _feeds(c: ConfigReader, norm: Norm, shared: int) -> list[FeedForward]:
    depth, width = num_layers_of(c), c.integer("intermediate_size", 9216)
    doubled = 2 if c.flag("use_double_wide_mlp", False) else 1
    act = activation_of(c)
    dense = [Mlp(width * (doubled if i >= depth - shared else 1), act) for i in range(depth)]
    if not c.flag("enable_moe_block", False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            c.raw(key, None)
        return list(dense)
    experts = num_experts_of(c, "num_experts")
    moe = Moe(
        experts=experts,
        top_k=c.integer("top_k_experts", maximum=experts),
        width=c.integer("moe_intermediate_size"),
        act=act,
        expert_scales=True,
    )
    scale = c.integer("hidden_size") ** -0.5
    return [DenseAndExperts(part, moe, norm, scale) for part in dense]


def _describe_unified(c: ConfigReader) -> Decoder:
    """Gemma 4 without inputs of layers and without experts."""
    c.supply(hidden_size_per_layer_input=0, sliding_window=1024)
    return _describe(c)


FAMILY = Family(("Gemma4ForCausalLM",), _describe, _RULES, ignored=UNUSED_TENSORS)
UNIFIED = Family(("Gemma4UnifiedForCausalLM",), _describe_unified, _RULES, ignored=UNUSED_TENSORS)
