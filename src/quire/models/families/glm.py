"""GLM and GLM-4 in the form of transformers: neighbours rotated in half of each head, gate and up
stored as one tensor; GLM-4 with norms before and after each sub-layer, also in GLM-4.1V.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, layer_rules, mlp, norm_rules, rms, stack
from quire.models.rope_config import shared_axes
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder

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


def with_axes(attn: Attention) -> Attention:
    """GLM-4V's attention: its classes share the frequencies out where a file does not."""
    if attn.rope is None or attn.rope.axes:
        return attn
    axes = shared_axes((8, 12, 12), attn.rope.dim // 2)
    return replace(attn, rope=replace(attn.rope, axes=axes))


def _describe_in_vl(c: ConfigReader) -> Decoder:
    attn = with_axes(attention(c, interleaved=True, qkv_bias=True))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5), post=True))


GLM = Family(("GlmForCausalLM",), _describe, _RULES)
GLM4 = Family(("Glm4ForCausalLM",), partial(_describe, post=True), _SANDWICH + _RULES)
GLM4_IN_VL = Family(("Glm4vTextModel",), _describe_in_vl, _SANDWICH + _RULES)
