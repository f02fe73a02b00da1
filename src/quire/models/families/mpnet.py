"""MPNet: BERT without token types, whose scores also depend on the distance between tokens."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.bert import TABLE_RULES, describe_bert
from quire.models.families.encoders import UNUSED_HEADS, forms, hidden_layer
from quire.models.families.llama import context_of, layer_rules
from quire.models.positions import BucketBias
from quire.models.rules import Family, rule
from quire.models.spec import Decoder

_RULES = (
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


def _describe(c: ConfigReader) -> Decoder:
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


FAMILY = forms(
    Family(
        (),
        _describe,
        _RULES,
        prefix="mpnet.",
        ignored=(r"embeddings\.position_ids", r"pooler\.dense\..*", UNUSED_HEADS),
    ),
    "MPNet",
    layers=hidden_layer("tanh"),
    rules=(
        rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
        rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
    ),
)
