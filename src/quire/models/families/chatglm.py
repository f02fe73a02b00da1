"""ChatGLM 2 and 3 and GLM-4-9B in their own form: GLM with q, k and v stored as one tensor, and
keys of Megatron.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import layer_rules, stack, top_rules
from quire.models.positions import Rope
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

RULES = (
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


def _describe(c: ConfigReader) -> Decoder:
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


FAMILY = Family(
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    _describe,
    RULES,
    prefix="transformer.",
    oracle="reference",
    ignored=(r"rotary_pos_emb\.inv_freq",),
)
