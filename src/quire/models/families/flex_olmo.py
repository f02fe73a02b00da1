"""FlexOlmo: OLMo 2's attention and norms with OLMoE's experts."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    attention,
    norm_rules,
    rms,
    stack,
)
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm, bias = rms(c, 1e-6, "rms_late_cast"), c.flag("attention_bias", False)
    attn = attention(c, theta=5e5, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, o_bias=bias)
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm, pre=False, post=True))


RULES = (
    *EMBEDDING_RULES,
    *ATTENTION_RULES,
    *QWEN_RULES,
    *norm_rules(attn_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"),
)
FAMILY = Family(("FlexOlmoForCausalLM",), _describe, RULES)
