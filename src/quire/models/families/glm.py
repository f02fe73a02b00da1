"""GLM and GLM-4 in the form of transformers: neighbours rotated in half of each head, gate and up
stored as one tensor; GLM-4 with norms before and after each sub-layer, also in GLM-4.1V and
GLM-OCR.
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


def with_axes(attn: Attention, sizes: tuple[int, int, int] = (8, 12, 12)) -> Attention:
    """Attention with frequencies shared out where a file does not, as GLM-4V's classes do it."""
    if attn.rope is None or attn.rope.axes:
        return attn
    axes = shared_axes(sizes, attn.rope.dim // 2)
    return replace(attn, rope=replace(attn.rope, axes=axes))


def _describe_in_vl(c: ConfigReader, *, bias: bool = True) -> Decoder:
    attn = with_axes(attention(c, interleaved=True, qkv_bias=bias))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5), post=True))


def _describe_ocr(c: ConfigReader) -> Decoder:
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    c.only("attention_bias", False)
    return _describe_in_vl(c, bias=False)


GLM = Family(("GlmForCausalLM",), _describe, _RULES)
GLM4 = Family(("Glm4ForCausalLM",), partial(_describe, post=True), _SANDWICH + _RULES)
GLM4_IN_VL = Family(("Glm4vTextModel",), _describe_in_vl, _SANDWICH + _RULES)
GLM_OCR = Family(
    ("GlmOcrTextModel",),
    _describe_ocr,
    _SANDWICH + _RULES,
    drafts_after_layers=True,
)
