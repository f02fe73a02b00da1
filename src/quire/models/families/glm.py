"""GLM and GLM-4 in the form of transformers: neighbours rotated in half of each head, gate and up
stored as one tensor; GLM-4 with norms before and after each sub-layer.
"""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    head_dim_of,
    layer_rules,
    mlp,
    norm_rules,
    rms,
    stack,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_RULES = layer_rules({"mlp.gate_up_proj": "mlp.gate mlp.up"}) + RULES
_SANDWICH = norm_rules(
    attn_pre="input_layernorm",
    attn_post="post_self_attn_layernorm",
    mlp_pre="post_attention_layernorm",
    mlp_post="post_mlp_layernorm",
)


def _stack(c: ConfigReader, **block: Any) -> Decoder:
    dim = head_dim_of(c, 128)
    bias = c.flag("attention_bias", True)
    attn = attention(c, head_dim=dim, partial=0.5, interleaved=True, qkv_bias=bias)
    return stack(c, Block(attn, mlp(c), rms(c, 1.5625e-07), **block))


def _describe_glm(c: ConfigReader) -> Decoder:
    return _stack(c)


def _describe_glm4(c: ConfigReader) -> Decoder:
    return _stack(c, post=True)


GLM = Family(("GlmForCausalLM",), _describe_glm, _RULES)
GLM4 = Family(("Glm4ForCausalLM",), _describe_glm4, _SANDWICH + _RULES)
