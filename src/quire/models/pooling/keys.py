"""The keys of a config.json that describe a pooler: its labels, and the sizes of its vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.pooling.spec import Classifier, HeadLayer, LabelActivation, PoolerSpec

_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_MODULES = "torch.nn.modules."
_ACTIVATIONS: dict[str, LabelActivation] = {
    "activation.Sigmoid": "sigmoid",
    "activation.Softmax": "softmax",
    "linear.Identity": "identity",
}
_MOST_LABELS = 2**20
_OF_LABELS = ("sentence_transformers", "sbert_ce_default_activation_function")
_OF_TOKENS = ("classifier_from_token", "method", "is_original_qwen3_reranker")
"""Keys that hf_overrides brings, for a classifier made of the language-model head's rows."""


def with_pooler_keys(c: ConfigReader, pooler: PoolerSpec) -> PoolerSpec:
    """The pooler with what the config says of any pooler: the sizes that its vectors may have, the
    dtype of its layers, and how a pair of texts is read.
    """
    c.ignore(*_OF_LABELS, *_OF_TOKENS)
    sizes = c.raw("matryoshka_dimensions", [])
    if not isinstance(sizes, list) or any(
        not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes
    ):
        raise unsupported("matryoshka_dimensions", sizes, "a list of sizes")
    is_any = c.flag("is_matryoshka", False)
    is_wide = c.choice_of("head_dtype", "float32", "model", absent="float32") == "float32"
    found = tuple(sizes) if sizes else () if is_any else None
    encodes_pairs = c.flag("use_sep_token", pooler.encodes_pairs)
    return replace(pooler, sizes=found, is_wide=is_wide, encodes_pairs=encodes_pairs)


def read_classifier(
    c: ConfigReader,
    *,
    bias: bool = True,
    layers: tuple[HeadLayer, ...] = (),
    deviation: float = 1.0,
) -> Classifier:
    """The classifier that a config declares, after `layers`; `bias`: whether its product has one;
    `deviation`: what its scores are divided by.

    Raises UnsupportedConfigValue for labels or an activation that no classifier has.
    """
    labels = _labels(c)
    count = c.integer("num_labels", None, maximum=_MOST_LABELS)
    if count is None:
        # what transformers has where a config says nothing
        count = len(labels) or 2
    names = tuple(labels.get(i) for i in range(count))
    activation = label_activation(c, count)
    return Classifier(count, activation, bias, layers, deviation=deviation, labels=names)


def _labels(c: ConfigReader) -> dict[int, str]:
    given = c.raw("id2label", {})
    c.ignore("label2id")
    try:
        named = {int(number): name for number, name in given.items()}
    except (AttributeError, ValueError, TypeError):
        raise unsupported("id2label", given, "an object with a name for each number") from None
    if len(named) > _MOST_LABELS or any(not isinstance(name, str) for name in named.values()):
        raise unsupported("id2label", given, "an object with a name for each number")
    return named


def label_activation(c: ConfigReader, num_labels: int) -> LabelActivation:
    """Activation of the scores of so many labels, by the config."""
    problem = c.choice_of("problem_type", *_PROBLEMS) if "problem_type" in c else None
    stated = _stated(c)
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    if problem is None and stated is not None:
        return stated
    # the softmax of a single label would always be 1
    return "sigmoid" if num_labels < 2 else "softmax"


def _stated(c: ConfigReader) -> LabelActivation | None:
    """Activation that sentence-transformers has written into the config."""
    section: Any = c.raw("sentence_transformers", {})
    older = c.raw("sbert_ce_default_activation_function", None)
    stated = section.get("activation_fn") if isinstance(section, dict) else None
    value = older if stated is None else stated
    if value is None:
        return None
    name = value.removeprefix(_MODULES) if isinstance(value, str) else ""
    if name not in _ACTIVATIONS or name == value:
        allowed = f"{_MODULES}activation.Sigmoid, .Softmax or {_MODULES}linear.Identity"
        raise unsupported("the activation of sentence-transformers", value, allowed)
    return _ACTIVATIONS[name]
