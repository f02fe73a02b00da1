"""The configs of published models become towers, key by key."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from quire.errors import UnknownConfigKey, UnsupportedArchitecture, UnsupportedConfigValue
from quire.media.prompt_rules.facts import PromptFacts
from quire.models.families import read_spec
from quire.models.reading.text_part import (
    config_of_whole,
    has_vision,
    text_part,
    without_vision,
)
from quire.models.vision.families import WHOLES, read_vision
from quire.models.vision.leaves import vision_leaves
from tests.house.package import ROOT
from tests.models.published_files import files
from tests.models.vision.published import PUBLISHED

FACTS = {
    "llava-1.5-7b-hf": (4096, 377, 23),
    "llava-v1.6-vicuna-7b-hf": (4096, 378, 23),
    "llava-onevision-qwen2-0.5b-ov-hf": (896, 424, 26),
    "Qwen2-VL-7B-Instruct": (3584, 519, 32),
    "Qwen2.5-VL-7B-Instruct": (3584, 518, 32),
    "gemma-3-4b-it": (2560, 439, 27),
    "paligemma2-3b-pt-224": (2304, 439, 27),
    "pixtral-12b": (5120, 222, 24),
    "SmolVLM-256M-Instruct": (576, 198, 12),
    "GLM-4.1V-9B-Thinking": (4096, 229, 24),
    "GLM-OCR": (1536, 443, 24),
    "PaddleOCR-VL-1.5": (1024, 443, 27),
    "Llama-4-Scout-17B-16E": (5120, 554, 34),
}
"""Width of a row, tensors, blocks: the last ones are left out that nothing reads."""


def read(name, **changes):
    text = text_part(PUBLISHED[name] | changes)
    return read_vision(text, text["hidden_size"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(name):
    model, foreign = read(name)
    tower = model.tower
    assert (tower.width, len(vision_leaves(tower)), len(tower.blocks)) == FACTS[name]
    assert len(model.whole.blocks) >= len(tower.blocks)
    known_to_be_foreign = {
        *("ignore_index", "use_image_newline_parameter", "in_chans", "spatial_patch_size"),
        *("num_image_tokens", "num_positions", "_vocab_size", "is_composition"),
        *("temporal_patch_size", "tokens_per_second"),
    }
    assert {key.path[-1] for key in foreign} <= known_to_be_foreign


def test_a_model_that_also_hears_is_read():
    lines = (Path(files.__file__).parent / "configs.jsonl").read_text().splitlines()
    [config] = [c["config"] for c in map(json.loads, lines) if c["name"] == "gemma-4-E2B"]
    model, foreign = read_vision(text_part(config), 1536)
    assert model.tower.is_bounded and len(model.tower.blocks) == 16
    assert len(vision_leaves(model.tower)) == 659
    assert not any("audio" in key.path[0] for key in foreign)


def vision(name, **changes):
    return {"vision_config": PUBLISHED[name]["vision_config"] | changes}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma-3-4b-it", {"mm_tokens_per_image": 255}, "mm_tokens_per_image=255"),
        ("llava-1.5-7b-hf", {"vision_feature_layer": 25}, "vision_feature_layer=25"),
        ("llava-1.5-7b-hf", {"projector_hidden_act": "mish"}, "projector_hidden_act='mish'"),
        ("llava-v1.6-vicuna-7b-hf", {"image_grid_pinpoints": [[336, 600]]}, "pinpoints"),
        ("llava-onevision-qwen2-0.5b-ov-hf", {"vision_aspect_ratio": "pad"}, "aspect_ratio='pad'"),
        ("Qwen2.5-VL-7B-Instruct", vision("Qwen2.5-VL-7B-Instruct", out_hidden_size=3), "out_hid"),
        ("pixtral-12b", vision("pixtral-12b", head_dim=32), "vision_config.head_dim=32"),
        ("Llama-4-Scout-17B-16E", vision("Llama-4-Scout-17B-16E", norm_eps=0.1), "norm_eps=0.1"),
    ],
)
def test_values_that_change_the_rows_and_are_not_implemented_are_refused(name, changes, named):
    with pytest.raises(UnsupportedConfigValue, match=named):
        read(name, **changes)


def test_a_key_that_the_reference_reads_at_another_value_is_refused():
    changes = vision("Qwen2.5-VL-7B-Instruct", layer_types=["full_attention"])
    with pytest.raises(UnknownConfigKey, match="vision_config.layer_types"):
        read("Qwen2.5-VL-7B-Instruct", **changes)


def test_another_tower_is_refused_by_name():
    changes = vision("llava-1.5-7b-hf", model_type="swin")
    with pytest.raises(UnsupportedArchitecture, match="'swin'.*language_model_only"):
        read("llava-1.5-7b-hf", **changes)


def test_text_alone_has_no_vision():
    text = text_part(PUBLISHED["llava-1.5-7b-hf"])
    assert has_vision(text)
    assert not has_vision(without_vision(text))
    assert not has_vision(text_part(PUBLISHED["llava-1.5-7b-hf"]["text_config"]))


def test_prompts_are_made_by_the_text_of_the_whole():
    text = text_part(
        {
            "model_type": "gemma4",
            "image_token_id": 7,
            "text_config": {
                "model_type": "gemma4_text",
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {"model_type": "gemma4_vision", "patch_size": 8},
        }
    )
    facts = PromptFacts({}, {}, config_of_whole(text))
    assert facts.text("use_bidirectional_attention") == "vision"
    assert facts.vision("patch_size") == 8 and facts.config["image_token_id"] == 7


def kinds_on_the_page():
    """The types of models that it lists: with encoders, for text alone, and refused."""
    page = (ROOT / "docs/pictures.md").read_text(encoding="utf-8")
    section = page.partition("\n## Models\n")[2].partition("\n## ")[0]
    lists = [part for part in section.split("\n\n") if re.fullmatch(r"(`[\w.-]+`[,.]\s*)+", part)]
    return [set(re.findall(r"`([\w.-]+)`", part)) for part in lists]


def test_the_page_lists_all_encoders():
    assert kinds_on_the_page()[0] == set(WHOLES)


@pytest.mark.full
def test_the_page_lists_all_models_of_transformers_that_are_refused():
    _, for_text, refused = kinds_on_the_page()
    found = {True: set(), False: set()}
    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for kind in names.keys() - WHOLES.keys():
        config = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
        text = text_part(config | {"architectures": [names[kind]]})
        try:
            read_spec(text)
        except UnsupportedArchitecture:
            found[False].add(kind)
        except UnsupportedConfigValue:  # the defaults of the class do not fit each other
            found[True].add(kind)
        else:
            found[True].add(kind)
        if has_vision(text):
            with pytest.raises(UnsupportedArchitecture, match="A vision encoder for the model"):
                read_vision(text, 1)
    assert (found[True], found[False]) == (for_text, refused)
