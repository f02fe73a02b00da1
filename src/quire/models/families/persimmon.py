"""Persimmon: layer norms, also over each query and key head, half of each head rotated, squared
relu.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    PRE_NORM_RULES,
    attention,
    layer_norm,
    layer_rules,
    mlp,
    stack,
    top_rules,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

RULES = (
    *top_rules("embed_tokens", "final_layernorm"),
    *layer_rules({"self_attn.query_key_value": "attn.q attn.k attn.v"}, step="by_head"),
    *layer_rules(
        {
            "self_attn.dense": "attn.o",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        }
    ),
    *PRE_NORM_RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    norm = layer_norm(c)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("qk_layernorm", True) else None,
        qkv_bias=True,
        o_bias=True,
    )
    return stack(c, Block(attn, mlp(c, act="relu2", gated=False, bias=True), norm))


FAMILY = Family(("PersimmonForCausalLM",), _describe, RULES)
