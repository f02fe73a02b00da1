"""Decoders with linear biases in place of positions: BLOOM and MPT."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    attention,
    head_dim_of,
    layer_norm,
    layer_rules,
    stack,
    top_rules,
)
from quire.models.positions import Alibi
from quire.models.reading.listed import IRRELEVANT
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp

_LAYER = "{prefix}h.{layer}."
BLOOM_RULES = (
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


def _describe_bloom(c: ConfigReader) -> Decoder:
    """BLOOM: linear biases (ALiBi) for positions, a norm on embeddings, biases everywhere."""
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


BLOOM = Family(("BloomForCausalLM",), _describe_bloom, BLOOM_RULES, prefix="transformer.")


MPT_RULES = (
    *top_rules("wte", "norm_f"),
    *layer_rules(
        {
            "norm_1": "attn_pre",
            "attn.Wqkv": "attn.q attn.k attn.v",
            "attn.out_proj": "attn.o",
            "norm_2": "mlp_pre",
            "ffn.up_proj": "mlp.up",
            "ffn.down_proj": "mlp.down",
        },
        at="{prefix}blocks.{layer}.",
    ),
)


def _describe_mpt(c: ConfigReader) -> Decoder:
    """MPT: linear biases (ALiBi) in place of positions, layer norms without bias."""
    c.rename(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    )
    c.only("expansion_ratio", 4)
    c.only("no_bias", True)
    c.only("logit_scale", None)
    c.only("embedding_fraction", 1.0)
    c.only("norm_type", "low_precision_layernorm")
    # positions are learned only where there are no biases
    c.ignore("learned_pos_emb", "init_config", "tokenizer_name", "verbose")
    norm = layer_norm(c, "layer_norm_epsilon", bias=False)
    feed = Mlp(4 * c.integer("hidden_size"), "gelu", gated=False)
    return stack(c, Block(_attention(c), feed, norm), tie=c.flag("tie_word_embeddings", True))


def _attention(c: ConfigReader) -> Attention:
    dim, section = head_dim_of(c), c.section("attn_config")
    if section is None:
        return attention(c, head_dim=dim, rope=None, alibi=Alibi())
    section.only("attn_type", "multihead_attention")
    section.only("alibi", True)
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        section.only(key, False)
    section.ignore(*IRRELEVANT, "attn_impl")
    return attention(
        c,
        head_dim=dim,
        rope=None,
        scale=section.number("softmax_scale", dim**-0.5),
        clip=section.bound("clip_qkv", None),
        alibi=Alibi(section.number("alibi_bias_max", 8.0)),
    )


MPT = Family(("MptForCausalLM", "MPTForCausalLM"), _describe_mpt, MPT_RULES, prefix="transformer.")
