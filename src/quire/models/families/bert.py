"""BERT, and what differs in tables or names: RoBERTa, ELECTRA, MPNet, DistilBERT, ALBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.encoders import (
    CLASSIFIER_RULES,
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
from quire.models.families.llama import (
    context_of,
    layer_norm,
    layer_rules,
    mlp,
    num_layers_of,
    stack,
)
from quire.models.pooling.spec import TermWeights
from quire.models.positions import BucketBias
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, Norm

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
    """BERT: learned positions, token types, norms after each sum, biases everywhere."""
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
    """RoBERTa: BERT whose positions begin after the padding token's id; fewer are usable."""
    first = c.integer("pad_token_id", 1, minimum=0) + 1
    rows = context_of(c)
    if rows <= first:
        raise unsupported("max_position_embeddings", rows, f"more than pad_token_id + 1 = {first}")
    decoder = describe_bert(c)
    return replace(
        decoder, learned_positions=rows - first, position_offset=first, context=rows - first
    )


def _bert_terms(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _eps(c)),))


def _terms_between(c: ConfigReader) -> TermWeights:
    """The terms of the tokens between the first and the last."""
    ends = c.integer("cls_token_id", 101, minimum=0), c.integer("sep_token_id", 102, minimum=0)
    return replace(_bert_terms(c), ends=ends)


def _terms_of_roberta(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _eps(c), None),))


_HEAD_RULES = (
    rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
    rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
)
_BERT_TERM_RULES = (
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
    term_head=TermHead(_bert_terms, _BERT_TERM_RULES),
    others=("BertForPreTraining",),
)
BERT_SPLADE = with_terms(
    _BERT, TermHead(_terms_between, _BERT_TERM_RULES), ("BertSpladeSparseEmbeddingModel",)
)


def _roberta(stem: str, prefix: str = "roberta.") -> tuple[Family, Family, Family]:
    return forms(
        replace(_ROBERTA, prefix=prefix),
        stem,
        layers=hidden_layer("tanh"),
        rules=_HEAD_RULES,
        term_head=TermHead(_terms_of_roberta, _TERM_RULES_OF_ROBERTA),
    )


ROBERTA = _roberta("Roberta")
XLM_ROBERTA = _roberta("XLMRoberta")
CAMEMBERT = _roberta("Camembert")
DATA2VEC_TEXT = _roberta("Data2VecText", "data2vec_text.")


def _describe_electra(c: ConfigReader) -> Decoder:
    """ELECTRA: BERT whose embedding tables may be narrower than its layers."""
    c.ignore("summary_last_dropout")
    decoder = describe_bert(c)
    width = c.integer("embedding_size", 128)
    return decoder if width == decoder.dim else replace(decoder, embed_width=width)


ELECTRA = forms(
    Family(
        (),
        _describe_electra,
        (
            *TABLE_RULES,
            *LAYER_RULES,
            rule("{prefix}embeddings_project.{leaf}", "embed_proj.{leaf}"),
        ),
        prefix="electra.",
        ignored=(
            r"embeddings\.position_ids",
            r"(discriminator|generator)_(predictions|lm_head)\..*",
            UNUSED_HEADS,
        ),
        other_ends=OLDER_NORMS,
    ),
    "Electra",
    layers=hidden_layer("gelu"),
    rules=_HEAD_RULES,
    others=("ElectraForPreTraining",),
)


_MPNET_RULES = (
    *TABLE_RULES,
    rule("{prefix}encoder.relative_attention_bias.weight", "distances.weight"),
    *layer_rules(
        {
            **{f"attention.attn.{part}": f"attn.{part}" for part in "qkvo"},
            "attention.LayerNorm": "attn_post",
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": "mlp_post",
        },
        at="{prefix}encoder.layer.{layer}.",
    ),
)
_FIRST_POSITION = 2
"""The rows before it are of padding, whatever the padding token's id."""
# transformers computes with these two whatever the key says, which only sizes the table
_BUCKETS, _MAX_DISTANCE = 32, 128


def _describe_mpnet(c: ConfigReader) -> Decoder:
    """MPNet: BERT without token types, whose scores also depend on the distance between tokens."""
    c.only("relative_attention_num_buckets", _BUCKETS)
    c.supply(type_vocab_size=0)
    decoder = describe_bert(c, distances=BucketBias(_BUCKETS, _MAX_DISTANCE))
    rows = context_of(c)
    if rows <= _FIRST_POSITION:
        raise unsupported("max_position_embeddings", rows, f"more than {_FIRST_POSITION}")
    usable = rows - _FIRST_POSITION
    return replace(
        decoder, learned_positions=usable, position_offset=_FIRST_POSITION, context=usable
    )


MPNET = forms(
    Family(
        (),
        _describe_mpnet,
        _MPNET_RULES,
        prefix="mpnet.",
        ignored=(r"embeddings\.position_ids", r"pooler\.dense\..*", UNUSED_HEADS),
    ),
    "MPNet",
    layers=hidden_layer("tanh"),
    rules=_HEAD_RULES,
)


_DISTILBERT_RULES = (
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


def _describe_distilbert(c: ConfigReader) -> Decoder:
    """DistilBERT: BERT without token types, with names of its own."""
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


def _distilbert_terms(c: ConfigReader) -> TermWeights:
    return TermWeights(c.integer("vocab_size"), (term_layer(c, _NORM.eps, "activation"),))


_DISTILBERT_TERM_RULES = (
    rule("vocab_transform.{leaf}", "pooler.layers.0.{leaf}"),
    rule("vocab_layer_norm.{leaf}", "pooler.layers.0.norm.{leaf}"),
    rule("vocab_projector.bias", "pooler.terms.bias"),
)
DISTILBERT = forms(
    Family(
        (),
        _describe_distilbert,
        _DISTILBERT_RULES,
        prefix="distilbert.",
        ignored=(r"embeddings\.position_ids", UNUSED_HEADS),
        other_ends=OLDER_NORMS,
    ),
    "DistilBert",
    layers=hidden_layer("relu"),
    rules=(rule("pre_classifier.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    term_head=TermHead(_distilbert_terms, _DISTILBERT_TERM_RULES),
)


_PARTS = {
    **{f"attention.{name}": f"attn.{name[0]}" for name in ("query", "key", "value")},
    "attention.dense": "attn.o",
    "attention.LayerNorm": "attn_post",
    "ffn": "mlp.up",
    "ffn_output": "mlp.down",
    "full_layer_layer_norm": "mlp_post",
}


def _describe_albert(c: ConfigReader) -> Decoder:
    """ALBERT: BERT with narrow embedding tables, and layers that run with the weights of a few."""
    c.supply(hidden_act="gelu_new")
    c.ignore(*("classifier_dropout_prob", "net_structure_type", "gap_size", "down_scale_factor"))
    c.only("num_memory_blocks", 0)
    c.only("inner_group_num", 1)
    decoder = describe_bert(c)
    layers, groups = num_layers_of(c), c.integer("num_hidden_groups", 1)
    if groups > layers:
        raise unsupported("num_hidden_groups", groups, f"at most num_hidden_layers={layers}")
    first: dict[int, int] = {}
    blocks = []
    for layer, block in enumerate(decoder.blocks):
        # divided in floats as transformers does it: where the groups do not divide the layers,
        # whole numbers would put the borders elsewhere
        of_group = first.setdefault(int(layer / (layers / groups)), layer)
        blocks.append(block if of_group == layer else replace(block, repeats=of_group))
    width = c.integer("embedding_size", 128)
    return replace(decoder, blocks=tuple(blocks), embed_width=width)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    """The weights of each group are those of its first layer."""
    firsts = [layer for layer, block in enumerate(decoder.blocks) if block.repeats is None]
    at = "{{prefix}}encoder.albert_layer_groups.{group}.albert_layers.0.{part}.{{leaf}}"
    return (
        *TABLE_RULES,
        rule("{prefix}encoder.embedding_hidden_mapping_in.{leaf}", "embed_proj.{leaf}"),
        *(
            rule(at.format(group=group, part=stored), f"layers.{layer}.{ours}.{{leaf}}")
            for group, layer in enumerate(firsts)
            for stored, ours in _PARTS.items()
        ),
    )


ALBERT = forms(
    Family(
        (),
        _describe_albert,
        _rules,
        prefix="albert.",
        ignored=(
            r"embeddings\.position_ids",
            r"pooler\..*",
            r"(predictions|sop_classifier)\..*",
            UNUSED_HEADS,
        ),
    ),
    "Albert",
    layers=hidden_layer("tanh"),
    rules=(rule("{prefix}pooler.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    others=("AlbertForPreTraining",),
)
