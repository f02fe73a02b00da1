"""InternLM 2 and 3: Llama; 2 with q, k and v stored as one tensor by key/value heads."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    layer_rules,
    mlp,
    rms,
    stack,
    top_rules,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_RULES_2 = (
    *top_rules("tok_embeddings", "norm", "output"),
    *layer_rules({"attention.wqkv": "attn.q attn.k attn.v"}, step="by_head"),
    *layer_rules(
        {
            "attention_norm": "attn_pre",
            "attention.wo": "attn.o",
            "ffn_norm": "mlp_pre",
            "feed_forward.w1": "mlp.gate",
            "feed_forward.w3": "mlp.up",
            "feed_forward.w2": "mlp.down",
        }
    ),
)


def _describe_2(c: ConfigReader) -> Decoder:
    bias = c.flag("bias", True)
    attn = attention(c, qkv_bias=bias, o_bias=bias)
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


def _describe_3(c: ConfigReader) -> Decoder:
    c.rename(attention_bias="qkv_bias", mlp_bias="bias")
    bias = c.flag("attention_bias", False)
    c.only("mlp_bias", bias)
    attn = attention(c, usual_dim=128, **biases(c))
    return stack(c, Block(attn, mlp(c, bias=bias), rms(c, 1e-5)))


INTERNLM2 = Family(("InternLM2ForCausalLM",), _describe_2, _RULES_2, oracle="reference")
INTERNLM3 = Family(("InternLM3ForCausalLM",), _describe_3, RULES)
