"""BERT and RoBERTa: learned positions, token types, norms after each sum, biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.encoders import (
    POOLER_RULES,
    UNUSED_HEADS,
    TermHead,
    check_encoder,
    forms,
    hidden_layer,
    term_layer,
    whole_attention,
    with_terms,
)
from quire.models.families.llama import context_of, layer_norm, layer_rules, mlp, stack
from quire.models.pooling.spec import TermWeights
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

TABLE_RULES = (
    rule("{prefix}embeddings.word_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.position_embeddings.weight", "positions.weight"),
    rule("{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
    rule("{prefix}embeddings.LayerNorm.{leaf}", "embed_norm.{leaf}"),
)
LAYER_RULES = layer_rules(
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
)
OLDER_NORMS = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Names of norms in files that were written from another library's."""
OF_OLD_FILES = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
    *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
)
"""Keys of another library's poolers."""


def _eps(c: ConfigReader) -> float:
    return c.number("layer_norm_eps", 1e-12)


def describe_bert(c: ConfigReader, **facts: Any) -> Decoder:
    """BERT's layers between its tables, with what differs in its attention as keywords."""
    check_encoder(c)
    c.only("position_embedding_type", "alibi" if "alibi" in facts else "absolute")
    c.ignore(*OF_OLD_FILES)
    norm = layer_norm(c, eps=_eps(c))
    feed = mlp(c, act="gelu", gated=False, bias=True)
    return stack(
        c,
        # norms follow each sum, so the last layer has already normed what a final norm would
        Block(whole_attention(c, qkv_bias=True, o_bias=True, **facts), feed, norm, norms_sum=True),
        embed_norm=norm,
        final_norm=None,
        learned_positions=context_of(c),
        token_types=c.integer("type_vocab_size", 2, minimum=0),
        tie=False,
    )


def _describe_roberta(c: ConfigReader) -> Decoder:
    """Positions begin after the padding token's id; the table has as many rows fewer to use."""
    first = c.integer("pad_token_id", 1, minimum=0) + 1
    rows = context_of(c)
    if rows <= first:
        raise unsupported("max_position_embeddings", rows, f"more than pad_token_id + 1 = {first}")
    decoder = describe_bert(c)
    return replace(
        decoder, learned_positions=rows - first, position_offset=first, context=rows - first
    )


def _terms(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _eps(c)),))


def _terms_between(c: ConfigReader) -> TermWeights:
    """The terms of the tokens between the first and the last."""
    ends = c.integer("cls_token_id", 101, minimum=0), c.integer("sep_token_id", 102, minimum=0)
    return replace(_terms(c), ends=ends)


def _terms_of_roberta(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _eps(c), None),))


_TERM_RULES = (
    rule("cls.predictions.transform.dense.{leaf}", "pooler.layers.0.{leaf}"),
    rule("cls.predictions.transform.LayerNorm.{leaf}", "pooler.layers.0.norm.{leaf}"),
    rule("cls.predictions.bias", "pooler.terms.bias"),
)
_TERM_RULES_OF_ROBERTA = (
    rule("lm_head.dense.{leaf}", "pooler.layers.0.{leaf}"),
    rule("lm_head.layer_norm.{leaf}", "pooler.layers.0.norm.{leaf}"),
    rule("lm_head.bias", "pooler.terms.bias"),
)
_BERT = Family(
    (),
    describe_bert,
    TABLE_RULES + LAYER_RULES,
    prefix="bert.",
    ignored=(r"embeddings\.position_ids", r"pooler\.dense\..*", UNUSED_HEADS),
    other_ends=OLDER_NORMS,
)
_ROBERTA = replace(_BERT, describe=_describe_roberta, prefix="roberta.")
BERT = forms(
    _BERT,
    "Bert",
    layers=hidden_layer("tanh"),
    rules=POOLER_RULES,
    term_head=TermHead(_terms, _TERM_RULES),
    others=("BertForPreTraining",),
)
BERT_SPLADE = with_terms(
    _BERT, TermHead(_terms_between, _TERM_RULES), ("BertSpladeSparseEmbeddingModel",)
)


def _roberta(stem: str, prefix: str = "roberta.") -> tuple[Family, Family, Family]:
    return forms(
        replace(_ROBERTA, prefix=prefix),
        stem,
        layers=hidden_layer("tanh"),
        rules=(
            rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
            rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
        ),
        term_head=TermHead(_terms_of_roberta, _TERM_RULES_OF_ROBERTA),
    )


ROBERTA = _roberta("Roberta")
XLM_ROBERTA = _roberta("XLMRoberta")
CAMEMBERT = _roberta("Camembert")
DATA2VEC_TEXT = _roberta("Data2VecText", "data2vec_text.")
