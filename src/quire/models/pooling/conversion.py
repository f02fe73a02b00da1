"""Generators as poolers: the pooler by name or option, and the family of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from quire.models.config_reader import ConfigReader
from quire.models.pooling.keys import read_classifier
from quire.models.pooling.spec import Classifier, HeadLayer, PoolerSpec
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Decoder

Form = Literal[
    "embed", "terms", "classify", "token_classify", "reward", "process_reward", "value_head"
]
"""Form into which a generator is converted; "terms" only for encoders."""

STEP_TAG = 151651
"""The token behind each step of a solution that Qwen's process reward models score."""

_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_FORMS: dict[str, Form] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "process_reward",
    "ForRewardModel": "reward",
    "ForRewardModeling": "reward",
    "ForTextEncoding": "embed",
    "EmbeddingModel": "embed",
    "TextModel": "embed",
    "Model": "embed",
}
"""End of an architecture's name -> form. The first that fits counts."""
_VALUE_HEADS = ("InternLM2",)
"""Beginnings of architectures whose reward model has a `v_head`."""


def generators_of(architecture: str) -> tuple[tuple[str, ...], Form] | None:
    """Names that a pooling architecture's generator may have, and its form; None for others."""
    if architecture.endswith(_GENERATORS):
        return None
    for end, form in _FORMS.items():
        stem = architecture.removesuffix(end)
        if stem and stem != architecture:
            form = "value_head" if form == "reward" and stem in _VALUE_HEADS else form
            stems = (stem, stem.removesuffix("Text"))
            names = (s + generator for s in stems for generator in _GENERATORS)
            return (*names, f"{stem}Model") if stem.endswith("Text") else tuple(names), form
    return None


def form_of(pooler: PoolerSpec) -> Form:
    """The form that a checkpoint with this pooler has, where its architecture does not say."""
    if pooler.terms is not None:
        return "terms"
    return "embed" if pooler.classifier is None else "classify"


def converted(family: Family, form: Form) -> Family:
    """The family of checkpoints in this form; a language-model head in them is ignored."""
    describe = family.describe

    def describe_pooler(c: ConfigReader) -> Decoder:
        return replace(describe(c), pooler=replace(_MAKERS[form](c), encodes_pairs=False))

    return with_pooler(replace(family, describe=describe_pooler), _rules(form))


def with_pooler(family: Family, rules: tuple[Rule, ...]) -> Family:
    """The family with these rules for its pooler, where a head that is not used is ignored."""
    names = r"(.*\.)?(lm_head|embed_out|output)\.(weight|bias)"

    def all_rules(decoder: Decoder) -> tuple[Rule, ...]:
        return (*family.rules_for(decoder), *rules, *_file_rules(decoder.pooler))

    return replace(family, rules=all_rules, ignored=(*family.ignored, names))


def _file_rules(pooler: PoolerSpec | None) -> tuple[Rule, ...]:
    """The rules of layers with files of their own, named by file, and of a projection."""
    dense = () if pooler is None else pooler.dense
    return tuple(
        rule(
            f"{layer.module}.{{leaf}}" if layer.file is None else f"{layer.file}:{{leaf}}",
            f"pooler.dense.{i}.{{leaf}}",
        )
        for i, layer in enumerate(dense)
    )


def _embed(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("embed", "token_embed"))


def _classify(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("classify", "token_classify"), classifier=read_classifier(c, bias=False))


def _token_classify(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("token_classify",), classifier=read_classifier(c))


def _reward(c: ConfigReader) -> PoolerSpec:
    layers = (HeadLayer(c.integer("hidden_size"), "relu"),)
    classifier = Classifier(1, "identity", bias=True, layers=layers)
    return PoolerSpec(("token_classify",), activates=False, classifier=classifier)


def _process_reward(c: ConfigReader) -> PoolerSpec:
    layers = (HeadLayer(c.integer("hidden_size"), "relu"),)
    classifier = Classifier(2, "softmax", bias=True, layers=layers)
    return PoolerSpec(
        ("token_classify",), token_pooling="step", step_tag=STEP_TAG, classifier=classifier
    )


def _value_head(c: ConfigReader) -> PoolerSpec:
    classifier = Classifier(1, "identity")
    return PoolerSpec(("token_classify",), activates=False, classifier=classifier)


_MAKERS: dict[Form, Callable[[ConfigReader], PoolerSpec]] = {
    "embed": _embed,
    "classify": _classify,
    "token_classify": _token_classify,
    "reward": _reward,
    "process_reward": _process_reward,
    "value_head": _value_head,
}


def _rules(form: Form) -> tuple[Rule, ...]:
    if form == "value_head":
        return (rule("v_head.{leaf}", "pooler.classifier.{leaf}"),)
    if form in ("reward", "process_reward"):
        return (
            rule("score.0.{leaf}", "pooler.layers.0.{leaf}"),
            rule("score.2.{leaf}", "pooler.classifier.{leaf}"),
        )
    return (rule("score.{leaf}", "pooler.classifier.{leaf}"),)
