"""BERT and RoBERTa: learned positions, token types, norms after each sum, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.encoders import (
    POOLER_RULES,
    UNUSED_HEADS,
    check_encoder,
    forms,
    hidden_layer,
    whole_attention,
)
from quire.models.families.llama import context_of, layer_norm, layer_rules, mlp, stack
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

_RULES = (
    rule("{prefix}embeddings.word_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.position_embeddings.weight", "positions.weight"),
    rule("{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
    rule("{prefix}embeddings.LayerNorm.{leaf}", "embed_norm.{leaf}"),
    *layer_rules(
        {
            "attention.self.query": "attn.q",
            "attention.self.key": "attn.k",
            "attention.self.value": "attn.v",
            "attention.output.dense": "attn.o",
            "attention.output.LayerNorm": "attn_post",
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": "mlp_post",
        },
        at="{prefix}encoder.layer.{layer}.",
    ),
)
_OF_OLD_FILES = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "output_past"),
    *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
)
"""Keys of another library's poolers."""


def _describe(c: ConfigReader) -> Decoder:
    check_encoder(c)
    c.only("position_embedding_type", "absolute")
    c.ignore(*_OF_OLD_FILES)
    norm = layer_norm(c, eps=c.number("layer_norm_eps", 1e-12))
    feed = mlp(c, act="gelu", gated=False, bias=True)
    return stack(
        c,
        Block(whole_attention(c, qkv_bias=True, o_bias=True), feed, norm, norms_sum=True),
        embed_norm=norm,
        final_norm=None,
        learned_positions=context_of(c),
        token_types=c.integer("type_vocab_size", 2),
        tie=False,
    )


def _describe_roberta(c: ConfigReader) -> Decoder:
    """Positions begin after the padding token's id; the table has as many rows fewer to use."""
    first = c.integer("pad_token_id", 1, minimum=0) + 1
    rows = context_of(c)
    if rows <= first:
        raise unsupported("max_position_embeddings", rows, f"more than pad_token_id + 1 = {first}")
    decoder = _describe(c)
    return replace(
        decoder, learned_positions=rows - first, position_offset=first, context=rows - first
    )


_BERT = Family(
    (),
    _describe,
    _RULES,
    prefix="bert.",
    ignored=(r"embeddings\.position_ids", r"pooler\.dense\..*", UNUSED_HEADS),
    other_ends=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)
_ROBERTA = replace(_BERT, describe=_describe_roberta, prefix="roberta.")
BERT = forms(_BERT, "Bert", layers=hidden_layer("tanh"), rules=POOLER_RULES)


def _roberta(stem: str) -> tuple[Family, Family, Family]:
    return forms(
        _ROBERTA,
        stem,
        layers=hidden_layer("tanh"),
        rules=(
            rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
            rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
        ),
    )


ROBERTA = _roberta("Roberta")
XLM_ROBERTA = _roberta("XLMRoberta")
CAMEMBERT = _roberta("Camembert")
