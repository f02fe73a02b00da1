"""Jina's embedders, of which v2 is BERT with linear biases (ALiBi) to both sides in place of
positions and gated units, and v3, in the form of transformers, BERT with rotated positions; and the
reranker around Qwen2-VL.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.bert import LAYER_RULES, TABLE_RULES, describe_bert
from quire.models.families.encoders import (
    POOLER_RULES,
    UNUSED_HEADS,
    forms,
    hidden_layer,
    pooling_family,
    whole_attention,
)
from quire.models.families.llama import context_of, layer_norm, layer_rules, mlp, stack
from quire.models.families.qwen import QWEN2
from quire.models.pooling.spec import Classifier, HeadLayer, PairPrompt, PoolerSpec
from quire.models.positions import Alibi
from quire.models.rope_config import read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp

_FORMS = {"geglu": "gelu", "reglu": "relu"}


def _describe_v2(c: ConfigReader) -> Decoder:
    # required here: the check in `describe_bert` lets an absent key pass, and transformers' default
    # has learned positions
    c.raw("position_embedding_type")
    c.ignore("emb_pooler", "attn_implementation")
    c.only("hidden_act", "gelu")
    decoder = describe_bert(c, alibi=Alibi())
    width, act = c.integer("intermediate_size"), c.choice("feed_forward_type", _FORMS)
    block = replace(decoder.blocks[0], mlp=Mlp(width, act, out_bias=True))
    return replace(decoder, blocks=(block,) * len(decoder.blocks), learned_positions=0)


def _describe_v3(c: ConfigReader) -> Decoder:
    c.only("is_decoder", False)
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings")
    attn = whole_attention(c, qkv_bias=True, o_bias=True)
    rope = read_rope(c, attn.head_dim, theta=20000.0, context=context_of(c))
    norm = layer_norm(c, eps=c.number("layer_norm_eps", 1e-5))
    feed = mlp(c, act="gelu", gated=False, bias=True)
    return stack(
        c,
        Block(replace(attn, rope=rope), feed, norm, norms_sum=True),
        embed_norm=norm,
        final_norm=None,
        token_types=c.integer("type_vocab_size", 1),
        tie=False,
    )


_V2_RULES = (
    *TABLE_RULES,
    *layer_rules(
        {
            "mlp.gated_layers": "mlp.gate mlp.up",
            "mlp.wo": "mlp.down",
            "mlp.layernorm": "mlp_post",
        },
        at="{prefix}encoder.layer.{layer}.",
    ),
    *LAYER_RULES,
)
_V3_RULES = (
    rule("{prefix}emb_ln.{leaf}", "embed_norm.{leaf}"),
    *TABLE_RULES,
    *layer_rules(
        {
            "mixer.Wqkv": "attn.q attn.k attn.v",
            "mixer.out_proj": "attn.o",
            "norm1": "attn_post",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
            "norm2": "mlp_post",
        },
        at="{prefix}encoder.layers.{layer}.",
    ),
)
_IGNORED = (r"embeddings\.position_ids", r"pooler\.dense\..*", UNUSED_HEADS)
V2 = forms(
    Family((), _describe_v2, _V2_RULES, prefix="bert.", oracle="reference", ignored=_IGNORED),
    "JinaBert",
    layers=hidden_layer("tanh"),
    rules=POOLER_RULES,
)
V3 = forms(
    Family((), _describe_v3, _V3_RULES, prefix="roberta.", ignored=_IGNORED),
    "JinaEmbeddingsV3",
    layers=hidden_layer("tanh"),
    rules=(
        rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
        rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
    ),
)


def _pairs(c: ConfigReader) -> PoolerSpec:
    """The ranking of pairs, by the code that is published with jina-reranker-m0."""
    layers = (HeadLayer(c.integer("hidden_size"), "relu"),)
    c.ignore("num_labels", "id2label", "label2id")
    classifier = Classifier(1, "sigmoid", bias=True, layers=layers, mean=2.65)
    pair = PairPrompt("**Document**:\n", "\n**Query**:\n", (100,))
    return PoolerSpec(("classify",), classifier=classifier, encodes_pairs=False, pair=pair)


def _describe_ranking(c: ConfigReader) -> Decoder:
    """Jina's reranker: the text of Qwen2-VL, which reads a pair of texts."""
    return QWEN2.describe(c)


RANKING = pooling_family(
    replace(QWEN2, describe=_describe_ranking),
    ("JinaVLForRanking",),
    _pairs,
    (
        rule("score.0.{leaf}", "pooler.layers.0.{leaf}"),
        rule("score.2.{leaf}", "pooler.classifier.{leaf}"),
    ),
)
