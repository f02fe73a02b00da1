"""Phi 1, 1.5 and 2: parallel blocks with one layer norm, partial rotation, biases everywhere, the
head's too.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    ATTENTION_RULES,
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
    *layer_rules(
        {
            "self_attn.dense": "attn.o",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        }
    ),
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    c.only("tie_word_embeddings", False)
    norm = layer_norm(c)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("qk_layernorm", False) else None,
        qkv_bias=True,
        o_bias=True,
    )
    feed = mlp(c, act="gelu_new", gated=False, bias=True)
    return stack(c, Block(attn, feed, norm, parallel="one_norm"), head_bias=True)


FAMILY = Family(("PhiForCausalLM",), _describe, RULES)
