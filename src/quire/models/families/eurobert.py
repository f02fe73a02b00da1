"""EuroBERT: Llama whose tokens see the whole prompt."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import CLASSIFIER_RULES, check_encoder, forms, hidden_layer
from quire.models.families.llama import RULES, describe_llama
from quire.models.pooling.spec import Classifier, SequencePooling
from quire.models.rules import Family, rule
from quire.models.spec import Decoder

_POOLINGS: dict[str, SequencePooling] = {"bos": "cls", "mean": "mean", "late": "mean"}


def _describe(c: ConfigReader) -> Decoder:
    check_encoder(c)
    c.ignore("classifier_pooling", "clf_pooling")  # of a classifier's, which reads them
    c.ignore("mask_token_id", "mask_token", "pad_token", "bos_token", "eos_token")
    return replace(describe_llama(c, is_causal=False, eps=1e-5), tie=False)


def _classifier(c: ConfigReader, classifier: Classifier) -> Classifier:
    return replace(classifier, is_late=_key(c) == "late")


def _key(c: ConfigReader) -> str:
    """`clf_pooling` is what published files call it."""
    c.rename(classifier_pooling="clf_pooling")
    key: str = c.choice("classifier_pooling", {name: name for name in _POOLINGS}, "late")
    return key


FAMILY = forms(
    Family((), _describe, RULES, ignored=(r"lm_head\..*",)),
    "EuroBert",
    layers=hidden_layer("gelu"),
    rules=(rule("dense.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    pooling=lambda c: _POOLINGS[_key(c)],
    classifier=_classifier,
)
