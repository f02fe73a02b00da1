"""OLMo 2: norms after the sub-layers only, and over the full width of queries and keys."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, norm_rules, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

OLMO2_RULES = RULES + norm_rules(
    attn_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"
)


def olmo2_block(c: ConfigReader, **facts: Any) -> Block:
    """The block of OLMo 2 and 3, with what differs in its attention as keywords."""
    norm = rms(c, 1e-5, "rms_late_cast")
    attn = attention(c, qk_norm=norm, qk_norm_over="full", **biases(c), **facts)
    return Block(attn, mlp(c), norm, pre=False, post=True)


def _describe(c: ConfigReader) -> Decoder:
    return stack(c, olmo2_block(c))


FAMILY = Family(("Olmo2ForCausalLM",), _describe, OLMO2_RULES)
