"""OLMo 1 to 3, and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    mlp,
    norm_rules,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm


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
