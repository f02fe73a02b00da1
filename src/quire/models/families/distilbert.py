"""DistilBERT: BERT without token types, with names of its own."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import (
    CLASSIFIER_RULES,
    UNUSED_HEADS,
    TermHead,
    check_encoder,
    forms,
    hidden_layer,
    term_layer,
    whole_attention,
)
from quire.models.families.llama import context_of, layer_rules, mlp, stack
from quire.models.pooling.spec import TermWeights
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Norm

_RULES = (
    rule("{prefix}embeddings.word_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.position_embeddings.weight", "positions.weight"),
    rule("{prefix}embeddings.LayerNorm.{leaf}", "embed_norm.{leaf}"),
    *layer_rules(
        {
            **{f"attention.{part}_lin": f"attn.{part}" for part in "qkv"},
            "attention.out_lin": "attn.o",
            "sa_layer_norm": "attn_post",
            "ffn.lin1": "mlp.up",
            "ffn.lin2": "mlp.down",
            "output_layer_norm": "mlp_post",
        },
        at="{prefix}transformer.layer.{layer}.",
    ),
)
_NORM = Norm("layer", 1e-12, bias=True)


def _describe(c: ConfigReader) -> Decoder:
    c.rename(
        hidden_size="dim",
        intermediate_size="hidden_dim",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
    )
    check_encoder(c)
    c.ignore("qa_dropout", "seq_classif_dropout", "tie_weights_")
    c.flag("sinusoidal_pos_embds", False)  # their values are in the file, too
    feed = mlp(c, act_key="activation", act="gelu", gated=False, bias=True)
    return stack(
        c,
        Block(whole_attention(c, qkv_bias=True, o_bias=True), feed, _NORM, norms_sum=True),
        embed_norm=_NORM,
        final_norm=None,
        learned_positions=context_of(c),
        tie=False,
    )


def _terms(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _NORM.eps, "activation"),))


_TERM_RULES = (
    rule("vocab_transform.{leaf}", "pooler.layers.0.{leaf}"),
    rule("vocab_layer_norm.{leaf}", "pooler.layers.0.norm.{leaf}"),
    rule("vocab_projector.bias", "pooler.terms.bias"),
)
FAMILY = forms(
    Family(
        (),
        _describe,
        _RULES,
        prefix="distilbert.",
        ignored=(r"embeddings\.position_ids", UNUSED_HEADS),
        other_ends=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    ),
    "DistilBert",
    layers=hidden_layer("relu"),
    rules=(rule("pre_classifier.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    term_head=TermHead(_terms, _TERM_RULES),
)
