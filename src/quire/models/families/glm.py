"""GLM and GLM-4 in the form of transformers: neighbours rotated in half of each head, gate and up
stored as one tensor; GLM-4 with norms before and after each sub-layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, layer_rules, mlp, norm_rules, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_RULES = layer_rules({"mlp.gate_up_proj": "mlp.gate mlp.up"}) + RULES
_SANDWICH = norm_rules(
    attn_pre="input_layernorm",
    attn_post="post_self_attn_layernorm",
    mlp_pre="post_attention_layernorm",
    mlp_post="post_mlp_layernorm",
)


def _describe(c: ConfigReader, **block: Any) -> Decoder:
    bias = c.flag("attention_bias", True)
    attn = attention(c, usual_dim=128, partial=0.5, interleaved=True, qkv_bias=bias)
    return stack(c, Block(attn, mlp(c), rms(c, 1.5625e-07), **block))


GLM = Family(("GlmForCausalLM",), _describe, _RULES)
GLM4 = Family(("Glm4ForCausalLM",), partial(_describe, post=True), _SANDWICH + _RULES)
