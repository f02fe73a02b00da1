"""Persimmon: layer norms, also over each query and key head, half of each head rotated, squared
relu.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    PRE_NORM_RULES,
    attention,
    context_of,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    stack,
)
from quire.models.rope_config import read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

RULES = (
    rule("{prefix}embed_tokens.weight", "embed.weight"),
    rule("{prefix}final_layernorm.{leaf}", "norm.{leaf}"),
    rule("lm_head.weight", "head.weight"),
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
    dim, norm = head_dim_of(c), layer_norm(c)
    attn = attention(
        c,
        head_dim=dim,
        rope=read_rope(c, dim, context=context_of(c), partial=0.5),
        qk_norm=norm if c.flag("qk_layernorm", True) else None,
        qkv_bias=True,
        o_bias=True,
    )
    return stack(c, Block(attn, mlp(c, act="relu2", gated=False, bias=True), norm))


FAMILY = Family(("PersimmonForCausalLM",), _describe, RULES)
