"""Common parts of encoders' families: their poolers, and the forms of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.pooling.keys import read_classifier
from quire.models.pooling.spec import (
    Classifier,
    HeadActivation,
    HeadLayer,
    PoolerSpec,
    TermWeights,
)
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Decoder

HEAD_ACTIVATIONS: dict[str, HeadActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
    "tanh": "tanh",
}
MakePooler = Callable[[ConfigReader], PoolerSpec]

UNUSED_HEADS = r"(cls|lm_head|head|decoder|vocab_\w+)\..*"
"""Names of what predicts masked tokens, which no pooler needs."""
CLASSIFIER_RULES = (rule("classifier.{leaf}", "pooler.classifier.{leaf}"),)
POOLER_RULES = (rule("{prefix}pooler.dense.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES)


class TermHead(NamedTuple):
    """Head that predicts masked tokens: it weighs the terms of sparse vectors."""

    describe: Callable[[ConfigReader], TermWeights]
    rules: tuple[Rule, ...]


def forms(
    family: Family,
    stem: str,
    *,
    layers: Callable[[ConfigReader], tuple[HeadLayer, ...]],
    rules: tuple[Rule, ...],
    token_layers: Callable[[ConfigReader], tuple[HeadLayer, ...]] | None = None,
    token_rules: tuple[Rule, ...] = CLASSIFIER_RULES,
    pooling: Callable[[ConfigReader], Any] = lambda c: "cls",
    term_head: TermHead | None = None,
    others: tuple[str, ...] = (),
    classifier: Callable[[ConfigReader, Classifier], Classifier] = lambda c, found: found,
) -> tuple[Family, Family, Family]:
    """The family of `stem`Model and `stem`ForMaskedLM, whose heads are left out, of
    `stem`ForSequenceClassification and of `stem`ForTokenClassification.

    layers, token_layers: what is between hidden states and classifiers, with `rules` and
    `token_rules` for both. pooling: what a classifier of texts reads. `term_head`: that of
    `stem`ForMaskedLM, which folders of sparse vectors use. `others`: further architectures whose
    heads are left out. `classifier`: what more a config says of that of texts.
    """

    def embed(c: ConfigReader) -> PoolerSpec:
        return PoolerSpec(("embed", "token_embed"), pooling="cls")

    def classify(c: ConfigReader) -> PoolerSpec:
        found = classifier(c, read_classifier(c, layers=layers(c)))
        return PoolerSpec(("classify",), pooling=pooling(c), classifier=found)

    def classify_tokens(c: ConfigReader) -> PoolerSpec:
        found = read_classifier(c, layers=() if token_layers is None else token_layers(c))
        return PoolerSpec(("token_classify",), classifier=found)

    terms = None if term_head is None else with_terms(family, term_head)
    embedders = (f"{stem}Model", f"{stem}ForMaskedLM", *others)
    embedder = pooling_family(family, embedders, embed, ())
    return (
        replace(embedder, terms=terms),
        pooling_family(family, (f"{stem}ForSequenceClassification",), classify, rules),
        pooling_family(family, (f"{stem}ForTokenClassification",), classify_tokens, token_rules),
    )


def pooling_family(
    family: Family, architectures: tuple[str, ...], make: MakePooler, rules: tuple[Rule, ...]
) -> Family:
    """The family of these architectures, with the pooler that `make` reads and its rules."""

    @wraps(family.describe)
    def describe(c: ConfigReader) -> Decoder:
        return replace(family.describe(c), pooler=make(c))

    return replace(
        family,
        architectures=architectures,
        describe=describe,
        rules=lambda decoder: (*family.rules_for(decoder), *rules),
        pools=True,
    )


def hidden_layer(act: HeadActivation) -> Callable[[ConfigReader], tuple[HeadLayer, ...]]:
    """One layer as wide as the model."""
    return lambda c: (HeadLayer(c.integer("hidden_size"), act),)


def with_terms(family: Family, head: TermHead, architectures: tuple[str, ...] = ()) -> Family:
    """The family of models with sparse vectors."""

    def weigh(c: ConfigReader) -> PoolerSpec:
        terms = head.describe(c)
        return PoolerSpec(("embed",), "cls", activates=False, similarity="dot", terms=terms)

    @wraps(family.describe)
    def describe(c: ConfigReader) -> Decoder:
        # terms are weighed with the embedding: a decoder of its own is among the names that are
        # left out
        c.only("tie_word_embeddings", True)
        return replace(family.describe(c), tie=True)

    return pooling_family(replace(family, describe=describe), architectures, weigh, head.rules)


def term_layer(
    c: ConfigReader, eps: float, act_key: str | None = "hidden_act", **facts: Any
) -> HeadLayer:
    """The layer before the language-model head: product, activation (default gelu), norm."""
    act: HeadActivation = "gelu"
    if act_key is not None:
        act = c.choice(act_key, HEAD_ACTIVATIONS, "gelu")
    return HeadLayer(c.integer("hidden_size"), act, **{"norm_eps": eps, "norm_bias": True, **facts})


def whole_attention(c: ConfigReader, head_dim: int | None = None, **facts: Any) -> Attention:
    """Attention of as many heads as `num_attention_heads`, over the whole prompt."""
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if head_dim is None:
        head_dim = width // heads
        if width % heads:
            raise unsupported("num_attention_heads", heads, f"a divisor of hidden_size={width}")
    return Attention(heads, heads, head_dim, head_dim**-0.5, is_causal=False, **facts)


def check_encoder(c: ConfigReader) -> None:
    """Take the keys of all encoders' files. Raises UnsupportedConfigValue for decoders."""
    c.only("is_decoder", False)
    c.only("is_causal", False)
    # ties are of heads that predict masked tokens, which are left out
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings")
