"""MPT: linear biases (ALiBi) in place of positions, layer norms without bias."""

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
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp

RULES = (
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


def _describe(c: ConfigReader) -> Decoder:
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


FAMILY = Family(("MptForCausalLM", "MPTForCausalLM"), _describe, RULES, prefix="transformer.")
