"""The tokens of pictures equal what transformers' processors write into the text."""

import importlib
import types

import numpy as np
import pytest

from quire.errors import RequestError, UnsupportedConfigValue
from quire.media.decoding.rgb import as_rgb, opened
from quire.media.faults import MediaFault
from quire.media.image_processors.table import read_processor
from quire.media.picture_files import named_tokens, picture_settings
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.prompt_rules.rule import ExpandedPicture
from quire.media.prompt_rules.table import RULES
from tests.media.pictures import odd_pictures
from tests.media.torchvision_stub import with_pillow_for_torchvision

SIZES = [
    (image.height, image.width)
    for image in (as_rgb(opened(data, 10**8)) for data in odd_pictures().values())
] + [(100, 400), (401, 97), (300, 300)]

BOI = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
NEXT_SIZE = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
PINPOINTS = {"image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]}

CASES = {
    "LlavaProcessor": (
        {"image_processor_type": "CLIPImageProcessor", "crop_size": 42},
        {"patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
        {},
    ),
    "LlavaNextProcessor": (
        {"image_processor_type": "LlavaNextImageProcessor", **NEXT_SIZE, **PINPOINTS},
        {"patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
        {},
    ),
    "LlavaNextVideoProcessor": (
        {"image_processor_type": "LlavaNextImageProcessor", **NEXT_SIZE, **PINPOINTS},
        {"patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
        {},
    ),
    "LlavaOnevisionProcessor": (
        {"image_processor_type": "LlavaOnevisionImageProcessor"}
        | {"size": {"height": 42, "width": 42}, **PINPOINTS},
        {"num_image_tokens": 9, "vision_feature_select_strategy": "full"}
        | {"vision_aspect_ratio": "anyres_max_2"},
        {},
    ),
    "Qwen2VLProcessor": ({"image_processor_type": "Qwen2VLImageProcessor"}, {}, {}),
    "Qwen2_5_VLProcessor": ({"image_processor_type": "Qwen2VLImageProcessorFast"}, {}, {}),
    "Qwen3VLProcessor": (
        {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16},
        {},
        {},
    ),
    "Glm4vProcessor": ({"image_processor_type": "Glm4vImageProcessor"}, {}, {}),
    "Glm46VProcessor": ({"image_processor_type": "Glm46VImageProcessor"}, {}, {}),
    "PaddleOCRVLProcessor": ({"image_processor_type": "PaddleOCRVLImageProcessor"}, {}, {}),
    "Kimi_K25Processor": ({"image_processor_type": "Kimi_K25ImageProcessor"}, {}, {}),
    "PixtralProcessor": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 200}},
        {"patch_size": 14, "spatial_merge_size": 2},
        {},
    ),
    "LightOnOcrProcessor": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 200}},
        {"patch_size": 14, "spatial_merge_size": 2, "effective_patch_size": 28},
        {},
    ),
    "Idefics3Processor": (
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 800}},
        {"image_seq_len": 5},
        {},
    ),
    "SmolVLMProcessor": (
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 300}}
        | {"max_image_size": {"longest_edge": 150}},
        {"image_seq_len": 7},
        {"fake_image_token": "<fake>", "global_image_token": "<whole>"},
    ),
    "Gemma3Processor": (
        {"image_processor_type": "Gemma3ImageProcessor"},
        {"image_seq_length": 6},
        BOI,
    ),
    "Gemma4Processor": (
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        {},
        BOI,
    ),
    "PaliGemmaProcessor": (
        {"image_processor_type": "SiglipImageProcessor", "image_seq_length": 11},
        {},
        {},
    ),
    "InternVLProcessor": (
        {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": False},
        {"image_seq_length": 3},
        {},
    ),
    "AyaVisionProcessor": (
        {"image_processor_type": "GotOcr2ImageProcessor"},
        {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        {},
    ),
    "Cohere2VisionProcessor": (
        {"image_processor_type": "Cohere2VisionImageProcessor", "patch_size": 2},
        {},
        {**BOI, "img_line_break_token": "<line>"},
    ),
    "Llama4Processor": (
        {"image_processor_type": "Llama4ImageProcessor"},
        {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        {},
    ),
    "Lfm2VlProcessor": (
        {"image_processor_type": "Lfm2VlImageProcessor", "max_image_tokens": 64}
        | {"min_image_tokens": 4, "tile_size": 256},
        {},
        {},
    ),
}
"""{processor class: (image processor's JSON, processor's JSON, the tokenizer's names)}."""

OF_WHOLE_MODELS = {
    *("ColIdefics3Processor", "ColPaliProcessor", "ColQwen2Processor", "ColQwen2_5_Processor"),
    *("ColQwen3Processor", "ColQwen3_5Processor", "OpsColQwen3Processor"),
    *("InternVLChatProcessor", "KimiVLProcessor"),
}
"""Rules without such a method there: those of retrievers, which take the rules of other classes,
and of classes outside of transformers. Whole models are compared instead
(tests/pooling/pictures/test_retrievers.py, tests/models/vision/test_published_internvl.py,
tests/models/vision/test_pictures.py).
"""


def settings_of(name):
    image, processor, tokens = CASES[name]
    return picture_settings(name, PromptFacts(processor, image, {}, tokens))


def judge(name, rule, settings):
    """transformers' processor, without a tokenizer: what its method reads is set."""
    home = {"Qwen2VLProcessor": "qwen2_vl", "Qwen3VLProcessor": "qwen3_vl"}.get(name)
    home = home or {
        "Qwen2_5_VLProcessor": "qwen2_5_vl",
        "LlavaNextProcessor": "llava_next",
        "LlavaNextVideoProcessor": "llava_next_video",
        "LlavaOnevisionProcessor": "llava_onevision",
        "PaliGemmaProcessor": "paligemma",
        "AyaVisionProcessor": "aya_vision",
        "Cohere2VisionProcessor": "cohere2_vision",
        "Lfm2VlProcessor": "lfm2_vl",
        "Kimi_K25Processor": "kimi_k25",
        "PaddleOCRVLProcessor": "paddleocr_vl",
        "LightOnOcrProcessor": "lighton_ocr",
    }.get(name, name.removesuffix("Processor").lower())
    kind = getattr(importlib.import_module(f"transformers.models.{home}.processing_{home}"), name)
    found = kind.__new__(kind)
    image, processor, tokens = CASES[name]
    defaults = {
        "image_token": rule.soft_token,
        "merge_size": 2,
        "num_additional_image_tokens": 0,
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>",
        "global_image_token": "<global-img>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "image_break_token": "[IMG_BREAK]",
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "img_patch_token": "<|IMG_PATCH|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
        "downsample_ratio": 4,
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }
    if name == "PixtralProcessor":
        defaults["image_end_token"] = "[IMG_END]"
    for key, value in (defaults | processor | tokens).items():
        vars(found)[key] = value
    found.image_processor = types.SimpleNamespace(
        **{"merge_size": 2, "use_thumbnail": True, "encoder_patch_size": 16, "downsample_factor": 2}
        | image
    )
    if name == "AyaVisionProcessor":
        found.patch_size = processor["patch_size"] * processor["downsample_factor"]
    if name == "Cohere2VisionProcessor":
        found.patch_size = image["patch_size"]
    if name == "PaliGemmaProcessor":
        found.image_seq_length = image["image_seq_length"]
    if name == "Gemma3Processor":
        inside = tokens["image_token"] * processor["image_seq_length"]
        found.full_image_sequence = f"\n\n{tokens['boi_token']}{inside}{tokens['eoi_token']}\n\n"
    return found


def inputs_of(layout, settings):
    """What the methods read of the arrays."""
    patch = settings.processor.get("patch_size", 14)
    return {
        "pixel_values": [np.zeros((layout.num_tiles, 3, *layout.tile))]
        if "Next" in settings.processor["image_processor_type"]
        or "Onevision" in settings.processor["image_processor_type"]
        else [np.zeros((3, *layout.tile))],
        "image_grid_thw": [np.array([1, *(side // patch for side in layout.resized)])],
        "image_sizes": [
            [layout.height, layout.width]
            if "Llava" in settings.processor["image_processor_type"]
            else list(layout.resized)
        ],
        "rows": [[layout.rows]],
        "cols": [[layout.cols]],
        "batch_num_images": [1],
        "num_crops": [layout.num_tiles - 1],
        "num_patches": [layout.num_tiles],
        "image_rows": [max(1, layout.rows)],
        "image_cols": [max(1, layout.cols)],
        "aspect_ratios": [[layout.rows, layout.cols]],
        "num_soft_tokens_per_image": [layout.resized[0] * layout.resized[1] // 48**2],
    }


def in_full(picture, soft_token):
    """The text with all tokens of the runs."""
    parts = picture.text.split(soft_token)
    return parts[0] + "".join(
        soft_token * run + part for run, part in zip(picture.runs, parts[1:], strict=True)
    )


def test_each_rule_has_a_case():
    assert set(RULES) == CASES.keys() | OF_WHOLE_MODELS


@pytest.mark.parametrize("name", CASES)
def test_expansions_equal_those_of_transformers(name, monkeypatch):
    if name in ("PixtralProcessor", "Lfm2VlProcessor"):
        with_pillow_for_torchvision(monkeypatch)
    settings = settings_of(name)
    rule, processor = settings.rule, read_processor(settings.processor)
    other = judge(name, rule, settings)
    lengths = set()
    for size in SIZES:
        try:
            layout = processor.layout(*size)
        except MediaFault:
            continue
        expected = other.replace_image_token(
            inputs_of(layout, settings), 0, use_image_special_tokens=True
        )
        picture = rule.expanded(layout)
        assert in_full(picture, rule.soft_token) == expected, size
        lengths.add(picture.num_rows)
    of_one_length = ("LlavaProcessor", "Gemma3Processor", "PaliGemmaProcessor")
    assert len(lengths) == 1 if name in of_one_length else len(lengths) > 1


def test_crops_of_gemma_3_follow_with_a_sentence():
    settings = settings_of("Gemma3Processor")
    changed = settings.changed({"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20})
    layout = read_processor(changed).layout(100, 300)
    picture = settings.rule.expanded(layout)
    expected = judge("Gemma3Processor", settings.rule, settings).replace_image_token(
        {"num_crops": [3]}, 0
    )
    assert layout.num_tiles == 4 and picture.runs == (6, 6, 6, 6)
    assert in_full(picture, "<soft>") == expected


def test_internvl_splits_whatever_its_image_processor_says():
    assert settings_of("InternVLProcessor").processor["crop_to_patches"] is True
    assert settings_of("PixtralProcessor").processor["patch_size"] == 28


TOKENS = ["\n\n\n\n", "\n\n\n", "\n\n", "\n", "<boi>", "<eoi>", "<soft>", "a", "b", " "]


def encode(text):
    """Longest match, as a tokenizer merges line breaks."""
    ids = []
    while text:
        found = next(each for each in TOKENS if text.startswith(each))
        ids.append(TOKENS.index(found))
        text = text[len(found) :]
    return ids


def decode(ids):
    return "".join(TOKENS[each] for each in ids)


TWO = [
    ExpandedPicture("\n\n<boi><soft><eoi>\n\n", (3,)),
    ExpandedPicture("\n\n<boi><soft><eoi>\n\n", (2,)),
]


@pytest.mark.parametrize("text", ["a<boi>b<boi>", "a\n<boi>\nb<boi>b", "<boi>\n\n<boi>\na"])
def test_ids_and_text_are_expanded_to_the_same_tokens(text):
    rule = settings_of("Gemma3Processor").rule
    of_text = encode(rule.prompt_text(text, TWO))
    of_ids = rule.prompt_ids(encode(text), TWO, encode("<boi>")[0], encode, decode)
    assert of_ids == of_text
    ids, places = rule.widened(of_text, TWO, encode("<soft>")[0])
    assert [sum(end - start for start, end in each) for each in places] == [3, 2]
    soft = [place for place, each in enumerate(ids) if TOKENS[each] == "<soft>"]
    assert [p for each in places for start, end in each for p in range(start, end)] == soft


def test_rows_of_pictures_stand_in_the_order_of_pictures():
    rule = settings_of("PixtralProcessor").rule
    vocabulary = ["a", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "b"]
    pictures = [
        ExpandedPicture("[IMG][IMG_BREAK][IMG][IMG_END]", (2, 2)),
        ExpandedPicture("[IMG][IMG_END]", (3,)),
    ]
    short = [0, 1, 2, 1, 3, 4, 1, 3]
    ids, places = rule.widened(short, pictures, vocabulary.index("[IMG]"))
    assert ids == [0, 1, 1, 2, 1, 1, 3, 4, 1, 1, 1, 3]
    assert places == [[(1, 3), (4, 6)], [(8, 11)]]


@pytest.mark.parametrize(
    ("text", "num", "words"),
    [
        ("<boi> <boi>", 1, "Found more '<boi>' placeholders in input prompt than actual"),
        ("<boi>", 0, "Found more"),
        ("a", 2, "has 0 '<boi>' placeholders for 2 pictures"),
    ],
)
def test_placeholders_and_pictures_are_counted(text, num, words):
    rule = settings_of("Gemma3Processor").rule
    with pytest.raises(RequestError, match=words):
        rule.prompt_text(text, TWO[:num])
    with pytest.raises(RequestError, match=words):
        rule.prompt_ids(encode(text), TWO[:num], encode("<boi>")[0], encode, decode)


def test_the_inside_of_a_picture_cannot_be_typed():
    rule = settings_of("Gemma3Processor").rule
    short = encode(rule.prompt_text("a<soft><boi>", TWO[:1]))
    with pytest.raises(RequestError, match="'<soft>', which stands for the inside"):
        rule.widened(short, TWO[:1], encode("<soft>")[0])


def test_paligemma_has_pictures_first():
    rule = settings_of("PaliGemmaProcessor").rule
    picture = ExpandedPicture("<image>", (11,))
    assert rule.prompt_text("what", [picture]) == "<image><bos>what\n"
    assert rule.prompt_text("<image>is <image>what", [picture] * 2) == (
        "<image>is <image><bos>what\n"
    )


def test_unknown_classes_and_missing_names_are_refused_by_name():
    image = {"image_processor_type": "CLIPImageProcessor"}
    with pytest.raises(UnsupportedConfigValue, match="DeepseekVLProcessor is not implemented"):
        picture_settings("DeepseekVLProcessor", PromptFacts(image=image))
    with pytest.raises(UnsupportedConfigValue, match="has no eoi_token"):
        gemma = {"image_processor_type": "Gemma3ImageProcessor"}
        tokens = {"boi_token": "<boi>"}
        picture_settings("Gemma3Processor", PromptFacts(image=gemma, tokens=tokens))
    with pytest.raises(UnsupportedConfigValue, match="patch_size=None"):
        picture_settings("LlavaProcessor", PromptFacts(image=image))


def test_names_of_tokens_are_read_from_all_forms():
    config = {
        "image_token": {"content": "<a>"},
        "extra_special_tokens": {"boi_token": "<b>", "image_token": "<c>"},
        "add_bos_token": True,
    }
    assert named_tokens(config) == {"image_token": "<a>", "boi_token": "<b>"}
