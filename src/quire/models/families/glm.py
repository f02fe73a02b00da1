"""GLM-4 and 4.5, alone and within models that see, and ChatGLM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    layer_rules,
    mlp,
    norm_rules,
    rms,
    stack,
    top_rules,
)
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    deepseek_experts_of,
    sparse_after,
    with_experts,
)
from quire.models.positions import Rope
from quire.models.rope_config import shared_axes
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

CHATGLM_RULES = (
    *top_rules("embedding.word_embeddings", "encoder.final_layernorm", "{prefix}output_layer"),
    *layer_rules(
        {
            "input_layernorm": "attn_pre",
            "self_attention.query_key_value": "attn.q attn.k attn.v",
            "self_attention.dense": "attn.o",
            "post_attention_layernorm": "mlp_pre",
            "mlp.dense_h_to_4h": "mlp.gate mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        at="{prefix}encoder.layers.{layer}.",
    ),
)


def _describe_chatglm(c: ConfigReader) -> Decoder:
    """ChatGLM 2 and 3, GLM-4-9B: GLM with q, k and v as one tensor, and Megatron's keys."""
    c.rename(
        num_hidden_layers="num_layers",
        max_position_embeddings="seq_length",
        vocab_size="padded_vocab_size",
    )
    for key in ("rmsnorm", "post_layer_norm", "multi_query_attention", "original_rope"):
        c.only(key, True)
    for key in (
        "add_bias_linear",
        "apply_residual_connection_post_layernorm",
        "fp32_residual_connection",
        "interleaved_qkv",
        "prefix_projection",
    ):
        c.only(key, False)
    # prefixes and codes that the published code makes while it loads
    for key in ("pre_seq_len", "quantization_bit"):
        c.only(key, None, 0)
    c.raw("apply_query_key_layer_scaling", None)  # divides scores and multiplies them again
    norm = Norm("rms", c.number("layernorm_epsilon", 1e-5))
    feed = Mlp(c.integer("ffn_hidden_size"))
    return stack(c, Block(_attention(c), feed, norm))


def _attention(c: ConfigReader) -> Attention:
    dim, heads = c.integer("kv_channels", 128), c.integer("num_attention_heads")
    # half of each head is rotated, its neighbours in pairs
    rope = Rope(1e4 * c.number("rope_ratio", 1.0), dim // 2, interleaved=True)
    return Attention(
        heads,
        c.integer("multi_query_group_num"),
        dim,
        dim**-0.5,
        rope,
        qkv_bias=c.flag("add_qkv_bias", False),
    )


CHATGLM = Family(
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    _describe_chatglm,
    CHATGLM_RULES,
    prefix="transformer.",
    oracle="reference",
    ignored=(r"rotary_pos_emb\.inv_freq",),
)


_RULES = layer_rules({"mlp.gate_up_proj": "mlp.gate mlp.up"}) + RULES
_SANDWICH = norm_rules(
    attn_pre="input_layernorm",
    attn_post="post_self_attn_layernorm",
    mlp_pre="post_attention_layernorm",
    mlp_post="post_mlp_layernorm",
)


def _describe_glm(c: ConfigReader, **block: Any) -> Decoder:
    """GLM and GLM-4 in the form of transformers: neighbours rotated in half of each head, gate and
    up stored as one tensor; GLM-4 with norms before and after each sub-layer, also in GLM-4.1V and
    GLM-OCR.
    """
    bias = c.flag("attention_bias", True)
    attn = attention(c, usual_dim=128, partial=0.5, interleaved=True, qkv_bias=bias)
    return stack(c, Block(attn, mlp(c), rms(c, 1.5625e-07), **block))


def with_axes(attn: Attention, sizes: tuple[int, int, int] = (8, 12, 12)) -> Attention:
    """Attention with frequencies shared out where a file does not, as GLM-4V's classes do it."""
    if attn.rope is None or attn.rope.axes:
        return attn
    axes = shared_axes(sizes, attn.rope.dim // 2)
    return replace(attn, rope=replace(attn.rope, axes=axes))


def _describe_in_vl_glm(c: ConfigReader, *, bias: bool = True) -> Decoder:
    """The text of GLM-4.1V: GLM-4 rotated by places on three axes."""
    attn = with_axes(attention(c, interleaved=True, qkv_bias=bias))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5), post=True))


def _describe_ocr(c: ConfigReader) -> Decoder:
    """The text of GLM-OCR: that of GLM-4.1V without biases."""
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    c.only("attention_bias", False)
    return _describe_in_vl_glm(c, bias=False)


GLM = Family(("GlmForCausalLM",), _describe_glm, _RULES)
GLM4 = Family(("Glm4ForCausalLM",), partial(_describe_glm, post=True), _SANDWICH + _RULES)
GLM4_IN_VL = Family(("Glm4vTextModel",), _describe_in_vl_glm, _SANDWICH + _RULES)
GLM_OCR = Family(
    ("GlmOcrTextModel",),
    _describe_ocr,
    _SANDWICH + _RULES,
    drafts_after_layers=True,
)


def _describe_glm4_moe(c: ConfigReader) -> Decoder:
    """GLM-4.5 to 4.7, also in 4.5V and 4.6V: half-rotated heads, DeepSeek-V3's experts."""
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    norm = rms(c, 1e-5)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("use_qk_norm", False) else None,
        qkv_bias=c.flag("attention_bias", False),
    )
    return _with_experts(c, attn)


def _describe_in_vl_glm4_moe(c: ConfigReader) -> Decoder:
    """The text of GLM-4.5V and 4.6V: GLM-4.5 rotated by places on three axes."""
    bias = c.flag("attention_bias", True)
    return _with_experts(c, with_axes(attention(c, partial=0.5, qkv_bias=bias)))


def _with_experts(c: ConfigReader, attn: Attention) -> Decoder:
    dense = Block(attn, mlp(c), rms(c, 1e-5))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse_after(c, dense=1)))


GLM4_MOE = Family(
    ("Glm4MoeForCausalLM",), _describe_glm4_moe, RULES + DEEPSEEK_RULES, drafts_after_layers=True
)
GLM4_MOE_IN_VL = Family(("Glm4vMoeTextModel",), _describe_in_vl_glm4_moe, RULES + DEEPSEEK_RULES)
