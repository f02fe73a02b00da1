"""ModernBERT: rotated positions with a base for each kind of layer, most layers local, gated units,
norms before the parts but none before the first attention.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import (
    CLASSIFIER_RULES,
    UNUSED_HEADS,
    TermHead,
    check_encoder,
    forms,
    term_layer,
    whole_attention,
)
from quire.models.families.llama import (
    biases,
    context_of,
    layer_norm,
    layer_rules,
    mlp,
    sliding_blocks,
    stack,
)
from quire.models.pooling.spec import HeadLayer, SequencePooling, TermWeights
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Norm

_RULES = (
    rule("{prefix}embeddings.tok_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.norm.{leaf}", "embed_norm.{leaf}"),
    rule("{prefix}final_norm.{leaf}", "norm.{leaf}"),
    *layer_rules(
        {
            "attn_norm": "attn_pre",
            "attn.Wqkv": "attn.q attn.k attn.v",
            "attn.Wo": "attn.o",
            "mlp_norm": "mlp_pre",
            "mlp.Wi": "mlp.gate mlp.up",
            "mlp.Wo": "mlp.down",
        }
    ),
)
_TRAINING = (
    *("initializer_cutoff_factor", "mlp_dropout", "deterministic_flash_attn", "decoder_bias"),
    *(
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "reference_compile",
        "repad_logits_with_grad",
    ),
)
"""Keys about training and about the head that predicts masked tokens."""
_OF_CLASSIFIERS = ("classifier_activation", "classifier_bias", "classifier_pooling")
"""Keys that files of other models have as well."""
_POOLINGS: dict[str, SequencePooling] = {"cls": "cls", "mean": "mean"}


def _norm(c: ConfigReader) -> Norm:
    norm = layer_norm(c, "norm_eps", bias=c.flag("norm_bias", False))
    c.only("layer_norm_eps", norm.eps)  # as published files say again
    return norm


def _describe(c: ConfigReader) -> Decoder:
    check_encoder(c)
    c.only("position_embedding_type", "absolute", "sans_pos")  # of which neither has any
    c.ignore(*_TRAINING, *_OF_CLASSIFIERS)
    attn = whole_attention(c, **biases(c))
    feed = mlp(c, act_key="hidden_activation", act="gelu", bias=c.flag("mlp_bias", False))
    period = c.integer("global_attn_every_n_layers", 3)
    block = Block(attn, feed, _norm(c))
    # so many tokens in all: half of them on each side, and the query's own
    window = c.integer("local_attention", 128) // 2 + 1
    bases = {
        "full_attention": c.number("global_rope_theta", 160000.0),
        "sliding_attention": c.number("local_rope_theta", 10000.0),
    }
    ropes = read_ropes(c, attn.head_dim, bases, context=context_of(c))
    blocks = sliding_blocks(c, block, lambda layer: layer % period, window, ropes)
    # the first layer's input comes out of the embedding's norm
    blocks[0] = replace(blocks[0], mixer_pre=False)
    return stack(c, blocks, embed_norm=block.norm, final_norm=block.norm, tie=False)


def _head(c: ConfigReader) -> tuple[HeadLayer, ...]:
    norm, bias = _norm(c), c.flag("classifier_bias", False)
    return (term_layer(c, norm.eps, "classifier_activation", bias=bias, norm_bias=norm.bias),)


def _pooling(c: ConfigReader) -> SequencePooling:
    pooling: SequencePooling = c.choice("classifier_pooling", _POOLINGS, "cls")
    return pooling


_LAYER_RULES = (
    rule("head.dense.{leaf}", "pooler.layers.0.{leaf}"),
    rule("head.norm.{leaf}", "pooler.layers.0.norm.{leaf}"),
)
_HEAD_RULES = (*_LAYER_RULES, *CLASSIFIER_RULES)
_TERM_RULES = (
    *_LAYER_RULES,
    rule("decoder.bias", "pooler.terms.bias"),
)
FAMILY = forms(
    Family((), _describe, _RULES, ignored=(UNUSED_HEADS,)),
    "ModernBert",
    layers=_head,
    rules=_HEAD_RULES,
    token_layers=_head,
    token_rules=_HEAD_RULES,
    pooling=_pooling,
    term_head=TermHead(
        lambda c: TermWeights(c.integer("vocab_size"), _head(c), c.flag("decoder_bias", True)),
        _TERM_RULES,
    ),
)
