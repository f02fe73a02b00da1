"""ELECTRA: BERT whose embedding tables may be narrower than its layers."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.bert import (
    LAYER_RULES,
    OLDER_NORMS,
    TABLE_RULES,
    describe_bert,
)
from quire.models.families.encoders import UNUSED_HEADS, forms, hidden_layer
from quire.models.rules import Family, rule
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.ignore("summary_last_dropout")
    decoder = describe_bert(c)
    width = c.integer("embedding_size", 128)
    return decoder if width == decoder.dim else replace(decoder, embed_width=width)


FAMILY = forms(
    Family(
        (),
        _describe,
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
    rules=(
        rule("classifier.dense.{leaf}", "pooler.layers.0.{leaf}"),
        rule("classifier.out_proj.{leaf}", "pooler.classifier.{leaf}"),
    ),
    others=("ElectraForPreTraining",),
)
