"""OLMoE: experts in every layer, and norms over the full width of queries and keys."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    PRE_NORM_RULES,
    attention,
    rms,
    stack,
)
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("clip_qkv", None)  # OLMoE would clip after the norm; no released model does
    norm, bias = rms(c, 1e-5), c.flag("attention_bias", False)
    attn = attention(c, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, o_bias=bias)
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm))


RULES = (*EMBEDDING_RULES, *ATTENTION_RULES, *PRE_NORM_RULES, *QWEN_RULES)
FAMILY = Family(("OlmoeForCausalLM",), _describe, RULES)
