"""Llama whose tokens see the whole prompt: EuroBERT, and embedders and rerankers of NVIDIA."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import (
    CLASSIFIER_RULES,
    check_encoder,
    forms,
    hidden_layer,
    pooling_family,
)
from quire.models.families.llama import RULES, describe_llama
from quire.models.pooling.keys import read_classifier
from quire.models.pooling.spec import Classifier, PoolerSpec, SequencePooling
from quire.models.rules import Family, rule
from quire.models.spec import Decoder

_EUROBERT_POOLINGS: dict[str, SequencePooling] = {"bos": "cls", "mean": "mean", "late": "mean"}


def _describe_eurobert(c: ConfigReader) -> Decoder:
    """EuroBERT: Llama whose tokens see the whole prompt."""
    check_encoder(c)
    c.ignore("classifier_pooling", "clf_pooling")  # of a classifier's, which reads them
    c.ignore("mask_token_id", "mask_token", "pad_token", "bos_token", "eos_token")
    return replace(describe_llama(c, is_causal=False, eps=1e-5), tie=False)


def _classifier(c: ConfigReader, classifier: Classifier) -> Classifier:
    return replace(classifier, is_late=_key(c) == "late")


def _key(c: ConfigReader) -> str:
    """`clf_pooling` is what published files call it."""
    c.rename(classifier_pooling="clf_pooling")
    key: str = c.choice("classifier_pooling", {name: name for name in _EUROBERT_POOLINGS}, "late")
    return key


EUROBERT = forms(
    Family((), _describe_eurobert, RULES, ignored=(r"lm_head\..*",)),
    "EuroBert",
    layers=hidden_layer("gelu"),
    rules=(rule("dense.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    pooling=lambda c: _EUROBERT_POOLINGS[_key(c)],
    classifier=_classifier,
)


_LLAMA_POOLINGS: dict[str, SequencePooling] = {
    "avg": "mean",
    "cls": "cls",
    "last": "last",
}


def _describe_llama_bidirectional(c: ConfigReader) -> Decoder:
    """Llama whose tokens see the whole prompt, as embedders and rerankers of NVIDIA have it."""
    c.only("is_causal", False)
    return describe_llama(c, is_causal=False)


def _pooling(c: ConfigReader) -> SequencePooling:
    pooling: SequencePooling = c.choice("pooling", _LLAMA_POOLINGS, "avg")
    return pooling


def _embed(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("embed", "token_embed"), _pooling(c), encodes_pairs=False)


def _classify(c: ConfigReader) -> PoolerSpec:
    classifier = read_classifier(c, bias=False, deviation=c.number("temperature", 1.0))
    return PoolerSpec(("classify",), _pooling(c), classifier=classifier, encodes_pairs=False)


_LLAMA_BIDIRECTIONAL = Family((), _describe_llama_bidirectional, RULES)
LLAMA_BIDIRECTIONAL = (
    pooling_family(_LLAMA_BIDIRECTIONAL, ("LlamaBidirectionalModel",), _embed, ()),
    pooling_family(
        _LLAMA_BIDIRECTIONAL,
        ("LlamaBidirectionalForSequenceClassification",),
        _classify,
        (rule("score.{leaf}", "pooler.classifier.{leaf}"),),
    ),
)
