"""OLMo 1 to 3, its mixtures of experts, and its hybrid."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    mlp,
    norm_rules,
    num_layers_of,
    read_kinds,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.mixers.recurrent.spec import GatedDelta
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Block, Decoder, Norm


def _describe_olmo(c: ConfigReader) -> Decoder:
    """OLMo: layer norms without parameters, bounded queries, keys and values."""
    attn = attention(c, clip=c.bound("clip_qkv", None), **biases(c))
    return stack(c, Block(attn, mlp(c), Norm("none", 1e-5)))


OLMO = Family(("OlmoForCausalLM",), _describe_olmo, RULES)


OLMO2_RULES = RULES + norm_rules(
    attn_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"
)


def olmo2_block(c: ConfigReader, **facts: Any) -> Block:
    """The block of OLMo 2 and 3, with what differs in its attention as keywords."""
    norm = rms(c, 1e-5, "rms_late_cast")
    attn = attention(c, qk_norm=norm, qk_norm_over="full", **biases(c), **facts)
    return Block(attn, mlp(c), norm, pre=False, post=True)


def _describe_olmo2(c: ConfigReader) -> Decoder:
    """OLMo 2: norms after the sub-layers only, and over the full width of queries and keys."""
    return stack(c, olmo2_block(c))


OLMO2 = Family(("Olmo2ForCausalLM",), _describe_olmo2, OLMO2_RULES)


def _describe_olmo3(c: ConfigReader) -> Decoder:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose rotation is not scaled."""
    theta = c.number("rope_theta", 5e5)
    bases = {"full_attention": theta, "sliding_attention": theta}
    ropes = read_ropes(c, head_dim_of(c), bases, context=context_of(c))
    block, window = olmo2_block(c, rope=None), window_of(c, 4096)
    return stack(c, sliding_blocks(c, block, lambda i: (i + 1) % 4, window, ropes))


OLMO3 = Family(("Olmo3ForCausalLM",), _describe_olmo3, OLMO2_RULES)


def _describe_olmoe(c: ConfigReader) -> Decoder:
    """OLMoE: experts in every layer, and norms over the full width of queries and keys."""
    c.only("clip_qkv", None)  # OLMoE would clip after the norm; no released model does
    norm = rms(c, 1e-5)
    attn = attention(c, qk_norm=norm, qk_norm_over="full", **biases(c))
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm))


OLMOE = Family(("OlmoeForCausalLM",), _describe_olmoe, RULES + QWEN_RULES)


def _describe_flex_olmo(c: ConfigReader) -> Decoder:
    """FlexOlmo: OLMo 2's attention and norms with OLMoE's experts."""
    norm = rms(c, 1e-6, "rms_late_cast")
    attn = attention(c, theta=5e5, qk_norm=norm, qk_norm_over="full", **biases(c))
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm, pre=False, post=True))


FLEX_OLMO = Family(("FlexOlmoForCausalLM",), _describe_flex_olmo, OLMO2_RULES + QWEN_RULES)


_FULL, _LINEAR = "full_attention", "linear_attention"


def _describe_olmo_hybrid(c: ConfigReader) -> Decoder:
    """OLMo Hybrid: delta nets that may turn states over, OLMo 3's attention, rotated or not."""
    norm = rms(c, 1e-6)
    section = c.raw("rope_parameters", None)
    # a base of null in rope_parameters stands for no rotation
    theta = section.get("rope_theta") if isinstance(section, dict) else None
    has_rope = "rope_theta" in c or theta is not None
    facts: dict[str, Any] = {} if has_rope else {"rope": None}
    attn = attention(c, qk_norm=norm, qk_norm_over="full", **biases(c), **facts)
    delta = _delta(c, attn)
    feed = mlp(c)
    blocks = [
        Block(attn, feed, norm, pre=False, post=True) if kind == _FULL else Block(delta, feed, norm)
        for kind in _kinds(c)
    ]
    return stack(c, blocks)


def _kinds(c: ConfigReader) -> list[str]:
    usual = [_FULL if i % 4 == 3 else _LINEAR for i in range(num_layers_of(c))]
    # as transformers has it: a model of less than four layers attends in its last
    if _FULL not in usual:
        usual[-1] = _FULL
    return read_kinds(c, "layer_types", (_FULL, _LINEAR), usual)


def _delta(c: ConfigReader, attn: Attention) -> GatedDelta:
    c.only("hidden_act", "silu")
    key_heads = c.integer("linear_num_key_heads", attn.heads)
    value_heads = c.integer("linear_num_value_heads", attn.heads)
    if value_heads % key_heads:
        allowed = f"a divisor of linear_num_value_heads={value_heads}"
        raise unsupported("linear_num_key_heads", key_heads, allowed)
    key_dim = c.integer("linear_key_head_dim", int(0.75 * c.integer("hidden_size") / key_heads))
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=c.integer("linear_value_head_dim", 2 * key_dim),
        kernel=c.integer("linear_conv_kernel_dim", 4, minimum=2),
        norm_eps=1e-5,  # whatever rms_norm_eps is
        strength=2.0 if c.flag("linear_allow_neg_eigval", True) else 1.0,
    )


_PARTS = {
    **{f"linear_attn.{part}_proj": f"mixer.{part}" for part in "qkvab"},
    **{f"linear_attn.{part}_conv1d": f"mixer.{part}_conv" for part in "qkv"},
    "linear_attn.g_proj": "mixer.z",
    "linear_attn.o_norm": "mixer.norm",
    "linear_attn.o_proj": "mixer.out",
}


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    """Norms lie around the parts, whose names therefore depend on the layer."""
    return (
        *layer_rules(_PARTS),
        rule(LAYER + "linear_attn.A_log", "layers.{layer}.mixer.decay_log"),
        rule(LAYER + "linear_attn.dt_bias", "layers.{layer}.mixer.step_bias"),
        *norm_rules(
            attn_pre="attention_layer_norm",
            mlp_pre="feedforward_layer_norm",
            attn_post="post_attention_layernorm",
            mlp_post="post_feedforward_layernorm",
        ),
        *RULES,
    )


OLMO_HYBRID = Family(
    ("OlmoHybridForCausalLM",),
    _describe_olmo_hybrid,
    _rules,
    # in files that transformers has written
    other_ends=((".post_attention_layernorm.weight", ".feedforward_layer_norm.weight"),),
)
