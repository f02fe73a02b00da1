"""The vision encoders that are known, and the way from a config to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedArchitecture
from quire.models.config_reader import ConfigReader
from quire.models.reading.keys import LeftKey, foreign_among
from quire.models.reading.reference import tower_kind_of, tower_reference, whole_reference
from quire.models.reading.text_part import PART, VISION, defaults_of
from quire.models.vision.families import (
    clip,
    gemma,
    glm4v,
    internvl,
    kimi,
    llama4,
    llava,
    paddle,
    pixtral,
    qwen_vl,
)
from quire.models.vision.rules import TowerFamily, VisionModel, WholeFamily

_TOWERS: tuple[TowerFamily, ...] = (
    *(clip.CLIP, clip.SIGLIP, clip.SIGLIP2, pixtral.PIXTRAL),
    *(qwen_vl.QWEN2, qwen_vl.QWEN2_5, qwen_vl.QWEN3),
    *(clip.IDEFICS3_TOWER, internvl.INTERN_TOWER, glm4v.GLM, glm4v.GLM_OCR, llama4.LLAMA4_TOWER),
    *(gemma.GEMMA4_TOWER, internvl.PUBLISHED_TOWER, paddle.PADDLE_TOWER, kimi.MOONVIT),
)
_WHOLES: tuple[WholeFamily, ...] = (
    *(llava.LLAVA, llava.LLAVA_NEXT, llava.LLAVA_ONEVISION, llava.AYA, llava.COHERE2),
    *(
        gemma.PALIGEMMA,
        gemma.GEMMA3,
        gemma.GEMMA4,
        pixtral.MISTRAL3,
        pixtral.MISTRAL_LARGE4,
        pixtral.LIGHTON_OCR,
        qwen_vl.WHOLE,
    ),
    *(clip.IDEFICS3, internvl.INTERN, internvl.LFM2, llama4.LLAMA4),
    *(clip.CLIP_MODEL, clip.SIGLIP_MODEL, internvl.PUBLISHED, paddle.PADDLE),
    *(kimi.KIMI_VL, kimi.KIMI_K25, llava.LLAVA_NEXT_VIDEO, llava.VIP_LLAVA),
)
TOWERS = {kind: family for family in _TOWERS for kind in family.kinds}
"""Families by the `model_type` of a `vision_config`."""
WHOLES = {kind: family for family in _WHOLES for kind in family.kinds}
"""Families by the `model_type` of a config.json."""

KEY = "vision_config"
_TEXT = "text_config"


def read_vision(config: Mapping[str, Any], width: int) -> tuple[VisionModel, tuple[LeftKey, ...]]:
    """The vision encoder of a model whose text has this config (`text_part`) and hidden states of
    `width` values, and the foreign keys of the rest of its file.

    Raises UnsupportedArchitecture, and what `quire.models.families.read_spec` raises for keys.
    """
    whole = config[PART][VISION]
    kind = whole.get("model_type")
    if kind not in WHOLES:
        raise UnsupportedArchitecture(_refusal("A vision encoder for the model type", kind, WHOLES))
    given = dict(whole[KEY])
    tower_kind = given.get("model_type") or tower_kind_of(kind)
    if tower_kind not in TOWERS:
        raise UnsupportedArchitecture(_refusal("The vision encoder", tower_kind, TOWERS))
    reference = tower_reference(tower_kind) or tower_reference(tower_kind_of(kind))
    if reference is not None:
        # inner objects leave out what is transformers' default
        given = defaults_of(reference, given) | given
    of_whole = whole_reference(kind)
    own = {key: value for key, value in whole.items() if key not in config or key in _OF_BOTH}
    if of_whole is not None:
        own = defaults_of(of_whole, own) | own
    family = WHOLES[kind]
    tower_family = family.towers.get(tower_kind, TOWERS[tower_kind])
    c = ConfigReader({**own, KEY: given, _TEXT: config})
    reader = c.subconfig(KEY)
    full = tower_family.describe(reader)
    tower = family.connect(c, full, width)
    c.ignore(*_OF_TEXT)
    foreign = foreign_among(reader.left(), reference, (KEY,), is_closed=False)
    outer = [key for key in c.left() if key.path[0] not in (KEY, _TEXT)]
    foreign += foreign_among(outer, of_whole, is_closed=False)
    has_spans = family.attends_both_ways(config)
    return VisionModel(tower, full, tower_family, family, has_spans), foreign


def _refusal(what: str, name: object, known: Mapping[str, object]) -> str:
    return (
        f"{what} {name!r} is not supported; supported are {', '.join(sorted(known))}. With "
        "language_model_only=True the model is served for text alone."
    )


_OF_BOTH = ("model_type", "projection_dim")
_OF_TEXT = (
    *("tie_word_embeddings", "vocab_size", "pad_token_id", "_pad_token_id", "hidden_size"),
    *("image_token_index", "image_token_id", "video_token_index", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"),
    *("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
)
"""Keys of the whole about its text, which the decoder's family reads, and about placeholders."""
