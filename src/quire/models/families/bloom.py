"""BLOOM: linear biases (ALiBi) in place of positions, a norm on embeddings, biases everywhere."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import attention, layer_norm, layer_rules, stack, top_rules
from quire.models.positions import Alibi
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp

_LAYER = "{prefix}h.{layer}."
RULES = (
    rule("{prefix}word_embeddings_layernorm.{leaf}", "embed_norm.{leaf}"),
    *top_rules("word_embeddings", "ln_f"),
    *layer_rules(
        {"self_attention.query_key_value": "attn.q attn.k attn.v"}, at=_LAYER, step="by_head"
    ),
    *layer_rules(
        {
            "input_layernorm": "attn_pre",
            "self_attention.dense": "attn.o",
            "post_attention_layernorm": "mlp_pre",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        at=_LAYER,
    ),
)
_TRAINED_LENGTH = 2048
"""The context of files that name none; biases have no end."""


def _describe(c: ConfigReader) -> Decoder:
    # published files have the names at the right, transformers writes those at the left
    c.rename(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    c.only("apply_residual_connection_post_layernorm", False)
    width = 4 * c.integer("hidden_size")
    c.only("n_inner", width)
    for fusion in ("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"):
        c.raw(fusion, None)  # how another library computes the same
    norm = layer_norm(c, "layer_norm_epsilon")
    attn = attention(c, rope=None, alibi=Alibi(), qkv_bias=True, o_bias=True)
    return stack(
        c,
        Block(attn, Mlp(width, "gelu_tanh", gated=False, bias=True), norm),
        embed_norm=norm,
        context=c.integer("seq_length", _TRAINED_LENGTH),
        tie=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family(("BloomForCausalLM",), _describe, RULES, prefix="transformer.")
