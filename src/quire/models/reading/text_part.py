"""The part of a config.json that is about text, where a model also takes pictures or sound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.models.reading.reference import Reference, reference_of_kind, text_kind_of

PART = "quire_text_part"
"""The key of a config that `text_part` made: the key of the text's object in the file, "" where it
has none, the architectures of the whole, and of a whole that takes pictures the rest of it
(`VISION`).
"""
VISION = "vision"
PROJECTION = "projection"
"""The key, among these, of the projection after a retriever's text (`Projection`)."""

_OBJECTS = ("text_config", "llm_config", "language_config")
_STORED = (
    *("quantization_config", "compression_config", "quantization", "quantization_file"),
    *("torch_dtype", "dtype", "transformers_version"),
)
_OF_THE_WHOLE = (
    *(*_STORED, "tie_word_embeddings", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys next to the object of text that are about text, too."""

_BUILT_AS: Mapping[str, str] = MappingProxyType(
    {
        "glm4v_moe_text": "Glm4vMoeTextModel",
        "glm4v_text": "Glm4vTextModel",
        "glm_ocr_text": "GlmOcrTextModel",
        "minimax_m3_vl_text": "MiniMaxM3SparseForCausalLM",
        "mistral_large4_text": "MistralLarge4ForCausalLM",
        "paddleocr_vl_text": "PaddleOCRTextModel",
        "qwen2_5_omni_text": "Qwen2ForCausalLM",
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen2_vl_text": "Qwen2ForCausalLM",
        "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
        "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
        "qwen3_vl_text": "Qwen3ForCausalLM",
    }
)
"""Types of text that transformers has within a whole alone, or stores otherwise there, and the
family that they are of: one whose positions are triples, which are equal for text, or whose names
are those of published files.
"""


_POOLERS = ("SequenceClassification", "TokenClassification", "ProcessRewardModel", "RewardModel")
"""The rest of the name of a whole whose text pools, behind "For"."""
_RANKERS = frozenset({"JinaVLForRanking"})
"""Wholes whose text has a family of its own under their name."""
_OF_LABELS = (
    *("num_labels", "id2label", "label2id", "problem_type", "sentence_transformers"),
    *("classifier_from_token", "method", "is_original_qwen3_reranker"),
)
"""Keys next to the object of such a text that are about its labels."""

_WRAPPED = "vlm_config"
"""The object of a retriever's config that is the config of the model within it."""
_RETRIEVERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("ColPaliForRetrieval", "ColQwen2ForRetrieval"), "embedding_proj_layer"),
        **dict.fromkeys(("ColPali", "ColQwen2", "ColQwen2_5", "ColQwen3_5"), "custom_text_proj"),
        "ColIdefics3": "linear",
        "ColQwen3": "embedding_proj_layer",
        "OpsColQwen3Model": "custom_text_proj",
    }
)
"""Models whose tokens, those of pictures too, have vectors, and the module that projects states:
those of transformers, those of colpali-engine with their adapters merged, and published code
around Qwen3-VL.
"""
_TYPES_WITHIN = {"colqwen3": "qwen3_vl", "ops_colqwen3": "qwen3_vl"}
"""Types of retrievers whose config is that of the model within, with more keys."""
_WIDTHS = ("embedding_dim", "embed_dim", "dims", "dim")
_RETRIEVER_WIDTH = 128


class Projection(NamedTuple):
    """The module that projects a retriever's states to `width` numbers, as config.json says it.
    sees_all: tokens of every prompt attend in both directions; ColPali was trained so, without a
    text to draw.
    """

    module: str
    width: Any
    sees_all: bool


_OF_PROMPTS: Mapping[object, tuple[str, ...]] = MappingProxyType(
    {"paligemma": ("use_bidirectional_attention",)}
)
"""Keys of text about prompts with pictures, which say themselves what attends to what."""


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, or where it describes a model of several parts the config of the part that
    generates text, as a config of its own: what the file leaves out has the value of transformers'
    class, and keys about other parts are left out.
    """
    retriever = next((n for n in config.get("architectures") or () if n in _RETRIEVERS), None)
    if retriever is not None:
        return _of_retriever(config, retriever)
    kind = text_kind_of(config.get("model_type"))
    key = next((key for key in _OBJECTS if isinstance(config.get(key), dict)), "")
    if not key and isinstance(thinker := config.get("thinker_config"), dict):
        return text_part({**thinker, "architectures": config.get("architectures")})
    if not key and kind is None:
        return dict(config)
    text: dict[str, Any] = dict(config[key] if key else config)
    if key:
        text |= {k: config[k] for k in _OF_THE_WHOLE if config.get(k) is not None}
    named = text.get("model_type")
    if kind is None or (key and named is not None) or reference_of_kind(named) is not None:
        # the whole's is only the usual one, and the text may name another
        kind = named
    reference = reference_of_kind(kind)
    if reference is not None:
        # inner objects leave out what is transformers' default
        text = defaults_of(reference, text) | text
    if config.get("model_type") == "clip" and "projection_dim" in config:
        # CLIP projects to the width of the whole, and ignores the text's
        text["projection_dim"] = config["projection_dim"]
    for name in _OF_PROMPTS.get(config.get("model_type"), ()):
        text.pop(name, None)
    listed = config[key].get("architectures") if key else None
    names = [*(listed or ()), *_generators(kind, reference)]
    whole = list(config.get("architectures") or ())
    if not _RANKERS.isdisjoint(map(str, whole)):
        names = whole
    elif (pooler := _pooler_of(whole)) is not None:
        names = [f"{_stem(name)}For{pooler}" for name in names]
        text |= {k: config[k] for k in _OF_LABELS if config.get(k) is not None}
    part: dict[str, Any] = {"key": key, "architectures": whole}
    if isinstance(config.get("vision_config"), dict):
        part[VISION] = {k: v for k, v in config.items() if k != key}
    return {**text, "model_type": kind, "architectures": names or whole, PART: part}


def _of_retriever(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The text of a model of late interaction that also takes pictures."""
    whole = config.get(_WRAPPED)
    if isinstance(whole, dict):
        whole = {**whole, **{k: config[k] for k in _STORED if config.get(k) is not None}}
    else:
        kind = config.get("model_type")
        whole = {**config, "model_type": _TYPES_WITHIN.get(str(kind), kind)}
    text = text_part({**whole, "architectures": []})
    width = next((config[key] for key in _WIDTHS if key in config), _RETRIEVER_WIDTH)
    sees_all = whole.get("model_type") == "paligemma"
    found = Projection(_RETRIEVERS[name], width, sees_all)
    part = {**text[PART], "architectures": [name], PROJECTION: [*found]}
    stems = [n.removesuffix("ForCausalLM") for n in text["architectures"]]
    return {**text, "architectures": [f"ColBERT{stem}Model" for stem in stems], PART: part}


def outer_objects(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The objects of the file that are around the keys of a config from `text_part`."""
    part = config.get(PART)
    return (part["key"],) if part and part["key"] else ()


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config of text (`text_part`) is of a model that takes pictures, too."""
    return VISION in config.get(PART, {})


def config_of_whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model that a text with pictures is part of, as transformers nests it."""
    return {**config[PART][VISION], "text_config": config}


def without_vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same text alone."""
    part = {key: value for key, value in config[PART].items() if key != VISION}
    return {**config, PART: part}


def _generators(kind: object, reference: Reference | None) -> list[str]:
    """The architectures that generate with a type."""
    if isinstance(kind, str) and kind in _BUILT_AS:
        return [_BUILT_AS[kind]]
    found = () if reference is None else reference.architectures
    return [name for name in found if name.endswith(("ForCausalLM", "LMHeadModel"))]


def _pooler_of(architectures: Iterable[object]) -> str | None:
    """The purpose of a whole with one of these names, if its text pools."""
    ends = (str(name).rpartition("For")[2] for name in architectures)
    return next((end for end in ends if end in _POOLERS), None)


def _stem(generator: str) -> str:
    """A name without what it generates with."""
    return generator.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")


def defaults_of(reference: Reference, text: Mapping[str, Any]) -> dict[str, Any]:
    """Values of transformers' class, but for tokens and what `text` has, perhaps renamed."""
    said = {*text, *(reference.aliases.get(key, key) for key in text)}
    said |= {alias for alias, key in reference.aliases.items() if key in said}
    return {
        key: default
        for key, default in reference.keys.items()
        if default is not None and key not in said and "." not in key
        if not key.endswith("_token_id") and key not in reference.aliases
    }
