"""Step-3.5: one gate for each head, more heads in sliding layers than in full ones, norms by 1 +
weight, and experts chosen by sigmoids and a learned bias next to a shared one, some of them
bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    context_of,
    layer_rules,
    mlp,
    num_layers_of,
    rms,
    stack,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import (
    experts_of,
    router_rule,
    select_bias_rule,
    shared_expert,
    shared_rules,
)
from quire.models.positions import Rope
from quire.models.rope_config import LEAST_THETA, SCALINGS, rope_from
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe, Norm

_KINDS = ("full_attention", "sliding_attention")
_RULES = (
    *layer_rules({"self_attn.g_proj": "attn.gate"}),
    router_rule("moe.gate"),
    select_bias_rule("moe.router_bias"),
    *(
        rule(
            f"{LAYER}moe.{part}_proj.weight",
            f"layers.{{layer}}.mlp.experts.{{expert}}.{part}.weight",
            steps=("stacked",),
        )
        for part in ("gate", "up", "down")
    ),
    *shared_rules("share_expert"),
    *RULES,
)


_USUAL = {
    "att_impl_type": "GQA",
    "sink": False,
    "use_moe": True,
    "moe_every_n_layer": 1,
    "moe_layer_offset": 0,
    "use_rope_layers": [],
}
"""Keys of published files at the one value that they have."""


def _describe(c: ConfigReader) -> Decoder:
    c.rename(
        num_key_value_heads="num_attention_groups",
        n_routed_experts="moe_num_experts",
        num_experts_per_tok="moe_top_k",
        share_expert_dim="share_expert_dims",
    )
    for key in ("use_head_wise_attn_gate", "zero_centered", "use_qk_norm"):
        c.only(key, True)
    for key, value in _USUAL.items():
        c.only(key, value)
    norm, window = rms(c, 1e-5, "rms1p"), window_of(c)
    kinds = _per_layer(c, "layer_types", lambda kind: kind in _KINDS, "full_attention")
    blocks = []
    for layer, (kind, feed) in enumerate(zip(kinds, _feeds(c), strict=True)):
        attn = _attention(c, kind, _rope(c, kind, layer), norm)
        blocks += with_windows(Block(attn, feed, norm), [kind], window)
    return stack(c, blocks)


def _attention(c: ConfigReader, kind: str, rope: Rope, norm: Norm) -> Attention:
    """Sliding layers may have another number of query heads."""
    heads = c.integer("num_attention_heads", 64)
    other = c.section("attention_other_setting")
    if other is not None:
        heads = _heads_elsewhere(c, other, kind, heads)
    dim = c.integer("head_dim", 128)
    return attention(
        c,
        head_dim=dim,
        heads=heads,
        rope=rope,
        scale=c.number("query_pre_attn_scalar", dim) ** -0.5,
        qk_norm=norm,
        gate="per_head",
        **biases(c),
    )


def _heads_elsewhere(c: ConfigReader, other: ConfigReader, kind: str, heads: int) -> int:
    """The heads of sliding layers, which differ in nothing else."""
    other.only("attention_type", "sliding_attention")
    other.only("num_attention_groups", c.integer("num_key_value_heads", 8))
    for key in ("head_dim", "true_head_dim"):
        other.only(key, c.integer("head_dim", 128))
    own = other.integer("num_attention_heads", heads)
    return own if kind == "sliding_attention" else heads


def _rope(c: ConfigReader, kind: str, layer: int) -> Rope:
    """Base and rotated share are given for each layer; the scaling is of full layers."""
    base = _per_layer(c, "rope_theta", partial(is_number, minimum=LEAST_THETA), 1e4)[layer]
    share = _per_layer(c, "partial_rotary_factors", partial(is_number, maximum=1.0), 1.0)[layer]
    c.only("yarn_only_types", ["full_attention"])
    scaling, dim = c.section("rope_scaling"), c.integer("head_dim", 128)
    if kind != "full_attention":
        scaling = None
    return rope_from(scaling, dim, float(base), float(share), context_of(c), SCALINGS, None)


def _feeds(c: ConfigReader) -> list[Mlp | Moe]:
    """Limits of a layer's experts, and of its shared expert or its dense part; 0: there is none."""
    sparse = _sparse_layers(c)
    of_experts = _per_layer(c, "swiglu_limits", _is_limit, None)
    of_others = _per_layer(c, "swiglu_limits_shared", _is_limit, None)
    return [
        _experts(c, bound or None, other or None) if is_sparse else _dense(c, other or None)
        for is_sparse, bound, other in zip(sparse, of_experts, of_others, strict=True)
    ]


def _dense(c: ConfigReader, bound: float | None) -> Mlp:
    return mlp(c, bias=c.flag("mlp_bias", False), bound=bound)


def _experts(c: ConfigReader, bound: float | None, shared_bound: float | None) -> Moe:
    c.only("moe_router_activation", "sigmoid")
    c.only("norm_expert_weight", True)
    c.only("use_moe_router_bias", True)
    c.only("mlp_bias", False)
    return experts_of(
        c,
        "n_routed_experts",
        score="sigmoid",
        scale=c.number("moe_router_scaling_factor", 1.0),
        select_bias=True,
        wide_router=c.flag("need_fp32_gate", False),
        bound=bound,
        shared=shared_expert(c, c.integer("share_expert_dim", 1280), bound=shared_bound),
    )


def _sparse_layers(c: ConfigReader) -> list[bool]:
    """`moe_layers_enum` lists layers with experts, in a string or a list; all from the third on."""
    depth, listed = num_layers_of(c), c.raw("moe_layers_enum", None)
    if listed is None:
        return [layer >= 3 for layer in range(depth)]
    words = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(words, list) or not all(str(word).strip().isdecimal() for word in words):
        raise unsupported("moe_layers_enum", listed, "numbers of layers, with commas between")
    layers = set(map(int, words))
    return [layer in layers for layer in range(depth)]


def _per_layer(
    c: ConfigReader, key: str, is_valid: Callable[[Any], bool], default: Any
) -> list[Any]:
    """A value for each layer, or one for all; entries after the last are of drafting layers."""
    depth, after = num_layers_of(c), c.integer("num_nextn_predict_layers", 0, minimum=0)
    value = c.raw(key, default)
    values = value if isinstance(value, list) else [value] * depth
    if len(values) not in (depth, depth + after):
        raise unsupported(key, value, "a list with one value for each layer")
    if not all(v is default or is_valid(v) for v in values):
        raise unsupported(key, value, "values that this family has, one for each layer")
    return values[:depth]


def _is_limit(value: Any) -> bool:
    return value is None or is_number(value, 0.0)


FAMILY = Family(
    ("Step3p5ForCausalLM",), _describe, _RULES, oracle="reference", drafts_after_layers=True
)
