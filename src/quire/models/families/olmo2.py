"""OLMo 2: norms after the sub-layers only, and over the full width of queries and keys."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MLP_RULES,
    attention,
    mlp,
    norm_rules,
    rms,
    stack,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

RULES = (
    *EMBEDDING_RULES,
    *ATTENTION_RULES,
    *MLP_RULES,
    *norm_rules(attn_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"),
)


def olmo2_block(c: ConfigReader, **facts: Any) -> Block:
    """The block of OLMo 2 and 3, with what differs in its attention as keywords."""
    norm, bias = rms(c, 1e-5, "rms_late_cast"), c.flag("attention_bias", False)
    attn = attention(c, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, o_bias=bias, **facts)
    return Block(attn, mlp(c), norm, pre=False, post=True)


def _describe(c: ConfigReader) -> Decoder:
    return stack(c, olmo2_block(c))


FAMILY = Family(("Olmo2ForCausalLM",), _describe, RULES)
