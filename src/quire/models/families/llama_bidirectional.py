"""Llama whose tokens see the whole prompt, as embedders and rerankers of NVIDIA have it."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import pooling_family
from quire.models.families.llama import RULES, describe_llama
from quire.models.pooling.keys import read_classifier
from quire.models.pooling.spec import PoolerSpec, SequencePooling
from quire.models.rules import Family, rule
from quire.models.spec import Decoder

_POOLINGS: dict[str, SequencePooling] = {"avg": "mean", "cls": "cls", "last": "last"}


def _describe(c: ConfigReader) -> Decoder:
    c.only("is_causal", False)
    return describe_llama(c, is_causal=False)


def _pooling(c: ConfigReader) -> SequencePooling:
    pooling: SequencePooling = c.choice("pooling", _POOLINGS, "avg")
    return pooling


def _embed(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("embed", "token_embed"), _pooling(c), encodes_pairs=False)


def _classify(c: ConfigReader) -> PoolerSpec:
    classifier = read_classifier(c, bias=False, deviation=c.number("temperature", 1.0))
    return PoolerSpec(("classify",), _pooling(c), classifier=classifier, encodes_pairs=False)


_FAMILY = Family((), _describe, RULES)
FAMILY = (
    pooling_family(_FAMILY, ("LlamaBidirectionalModel",), _embed, ()),
    pooling_family(
        _FAMILY,
        ("LlamaBidirectionalForSequenceClassification",),
        _classify,
        (rule("score.{leaf}", "pooler.classifier.{leaf}"),),
    ),
)
