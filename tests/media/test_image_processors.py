"""Pixels equal those of transformers' classes, on odd pictures."""

import importlib
import re

import numpy as np
import pytest
from PIL import Image

from quire.media.decoding.rgb import as_rgb, opened
from quire.media.faults import MediaFault
from quire.media.image_processors.table import PROCESSORS, read_processor
from tests.media.pictures import odd_pictures
from tests.media.torchvision_stub import with_pillow_for_torchvision

PICTURES = {name: as_rgb(opened(data, 10**8)) for name, data in odd_pictures().items()}

SMALL = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}

CASES = {
    "clip": ("clip", "CLIPImageProcessor", {"size": 41, "crop_size": 33}),
    "clip without a crop": (
        "clip",
        "CLIPImageProcessor",
        {"do_center_crop": False, "size": {"height": 20, "width": 31}, "do_normalize": False},
    ),
    "clip within edges": (
        "clip",
        "CLIPImageProcessor",
        {
            "size": {"shortest_edge": 40, "longest_edge": 70},
            "do_resize": True,
            "crop_size": {"height": 64, "width": 48},
            "rescale_factor": 0.01,
        },
    ),
    "clip without resizing": ("clip", "CLIPImageProcessor", {"do_resize": False, "crop_size": 45}),
    "siglip": ("siglip", "SiglipImageProcessor", {"size": {"height": 32, "width": 48}}),
    "siglip with a crop": (
        "siglip",
        "SiglipImageProcessor",
        {"size": {"height": 40, "width": 40}, "do_center_crop": True, "crop_size": 31},
    ),
    "siglip on a canvas": (
        "siglip",
        "SiglipImageProcessor",
        {
            "size": {"max_height": 50, "max_width": 60},
            "do_pad": True,
            "pad_size": {"height": 61, "width": 64},
        },
    ),
    "siglip2": ("siglip2", "Siglip2ImageProcessor", {"max_num_patches": 64, "patch_size": 8}),
    "llava": ("llava", "LlavaImageProcessor", {"do_pad": True, "size": 36, "crop_size": 36}),
    "llava next": (
        "llava_next",
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
        },
    ),
    "llava onevision": (
        "llava_onevision",
        "LlavaOnevisionImageProcessor",
        {
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 32], [32, 96], [64, 64], [96, 32]],
        },
    ),
    "qwen2-vl": ("qwen2_vl", "Qwen2VLImageProcessor", {"size": SMALL}),
    "qwen3-vl": (
        "qwen2_vl",
        "Qwen2VLImageProcessor",
        {"size": SMALL, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ),
    "qwen2-vl by pixels": (
        "qwen2_vl",
        "Qwen2VLImageProcessor",
        {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9, "temporal_patch_size": 3},
    ),
    "glm-4v": ("glm4v", "Glm4vImageProcessor", {"size": SMALL}),
    "glm-4.6v": ("glm46v", "Glm46VImageProcessor", {"size": SMALL}),
    "paddleocr-vl": ("paddleocr_vl", "PaddleOCRVLImageProcessor", {"size": SMALL}),
    "paddleocr-vl, two frames": (
        "paddleocr_vl",
        "PaddleOCRVLImageProcessor",
        {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9, "temporal_patch_size": 2},
    ),
    "kimi": (
        "kimi_k25",
        "Kimi_K25ImageProcessor",
        {"max_patches": 60, "size": {"max_height": 20, "max_width": 20}},
    ),
    "pixtral": (
        "pixtral",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 150}, "patch_size": {"height": 16, "width": 16}},
    ),
    "idefics3": (
        "idefics3",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 48}},
    ),
    "idefics3 whole": (
        "idefics3",
        "Idefics3ImageProcessor",
        {
            "size": {"longest_edge": 120},
            "max_image_size": {"longest_edge": 48},
            "do_image_splitting": False,
        },
    ),
    "smolvlm in one tile": (
        "smolvlm",
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 64}},
    ),
    "gemma3": ("gemma3", "Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}),
    "gemma3 with crops": (
        "gemma3",
        "Gemma3ImageProcessor",
        {
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 20,
            "pan_and_scan_max_num_crops": 3,
            "pan_and_scan_min_ratio_to_activate": 1.1,
        },
    ),
    "gemma4": ("gemma4", "Gemma4ImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
    "internvl": (
        "got_ocr2",
        "GotOcr2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 6},
    ),
    "aya, at least two tiles": (
        "got_ocr2",
        "GotOcr2ImageProcessor",
        {
            "size": {"height": 24, "width": 32},
            "crop_to_patches": True,
            "min_patches": 2,
            "max_patches": 5,
        },
    ),
    "internvl whole": ("got_ocr2", "GotOcr2ImageProcessor", {"size": 32}),
    "command a vision": (
        "cohere2_vision",
        "Cohere2VisionImageProcessor",
        {"size": {"height": 48, "width": 48}, "max_patches": 7},
    ),
    "llama 4": ("llama4", "Llama4ImageProcessor", {"size": {"height": 36, "width": 36}}),
    "llama 4 enlarged": (
        "llama4",
        "Llama4ImageProcessor",
        {
            "size": {"height": 36, "width": 36},
            "resize_to_max_canvas": True,
            "max_patches": 5,
        },
    ),
    "lfm2-vl": (
        "lfm2_vl",
        "Lfm2VlImageProcessor",
        {
            "tile_size": 64,
            "min_image_tokens": 2,
            "max_image_tokens": 9,
            "encoder_patch_size": 8,
            "max_tiles": 6,
        },
    ),
}
"""{name: (transformers' module, class, settings)}: small sizes, for speed."""

SQUASHED = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
"""Arrays that two of the references have for all tiles of a batch, without the picture's axis."""


@pytest.fixture(scope="module")
def references():
    return {}


def reference(case, monkeypatch, kept):
    """transformers' object, the Pillow form where there is one."""
    module, name, settings = CASES[case]
    has_twin = module not in ("cohere2_vision", "llama4", "lfm2_vl", "kimi_k25")
    if not has_twin:
        with_pillow_for_torchvision(monkeypatch)
    if case not in kept:
        file = f"image_processing_{'pil_' * has_twin}{module}"
        home = importlib.import_module(f"transformers.models.{module}.{file}")
        kept[case] = getattr(home, name + "Pil" * has_twin)(**settings)
    return kept[case], has_twin


def expected_arrays(case, image, monkeypatch, kept):
    """What the reference makes of one picture, without the axes of a batch."""
    judge, has_twin = reference(case, monkeypatch, kept)
    found = judge(image, return_tensors="np" if has_twin else "pt")
    # numpy has no bfloat16, in which Llama 4 has its pixels
    arrays = {n: np.asarray(v if has_twin else v.double()) for n, v in found.items()}
    if CASES[case][0] in ("llama4", "lfm2_vl"):
        arrays = {n: v if n in SQUASHED else v[0] for n, v in arrays.items()}
        if "lfm2" in CASES[case][0]:
            arrays["pixel_values"] = arrays["pixel_values"].reshape(
                -1, *arrays["pixel_values"].shape[-2:]
            )
    elif CASES[case][0] not in (
        *("qwen2_vl", "glm4v", "glm46v", "gemma3", "got_ocr2", "kimi_k25", "paddleocr_vl"),
    ) and (CASES[case][0] != "cohere2_vision"):
        arrays = {n: v[0] for n, v in arrays.items()}
    elif "image_grid_thw" in arrays:
        arrays["image_grid_thw"] = arrays["image_grid_thw"][0]
    return arrays


@pytest.mark.parametrize("case", CASES)
def test_pixels_equal_those_of_transformers(case, monkeypatch, references):
    processor = read_processor({"image_processor_type": CASES[case][1], **CASES[case][2]})
    compared = 0
    for name, image in PICTURES.items():
        try:
            layout = processor.layout(image.height, image.width)
        except MediaFault:
            with pytest.raises((ValueError, RuntimeError), match=r"ratio|0 x 0|[Pp]ad|stack"):
                expected_arrays(case, image, monkeypatch, references)
            continue
        try:
            expected = expected_arrays(case, image, monkeypatch, references)
        except ValueError as error:
            # It resizes one side to nothing, of which we keep one pixel, patch or tile.
            nothing = re.search("must be > 0|(height|width)=0,", str(error))
            assert nothing and min(image.size) == 1, name
            continue
        found = processor.arrays(image, layout)
        for key, value in found.items():
            if key in expected:
                assert value.shape == expected[key].shape, (name, key)
                np.testing.assert_allclose(
                    value.astype(np.float64), expected[key], rtol=0, atol=1e-5, err_msg=name
                )
        assert "pixel_values" in expected
        assert found["pixel_values"].dtype == np.float32
        assert found["pixel_values"].size <= max(layout.num_values * 3, 10**6)
        compared += 1
    assert compared >= 9


def test_every_class_has_a_case():
    assert {name for _, name, _ in CASES.values()} == set(PROCESSORS)


@pytest.mark.parametrize("fault", ["BGR", "another filter", "another order of patches"])
def test_the_pictures_show_a_planted_fault(fault):
    """What these faults do is far above the tolerance, on every picture with more than a colour."""
    name, settings = CASES["qwen2-vl"][1:]
    processor = read_processor({"image_processor_type": name, **settings})
    image = PICTURES["alpha"]
    layout = processor.layout(image.height, image.width)
    right = processor.arrays(image, layout)["pixel_values"]
    if fault == "another filter":
        other = read_processor({"image_processor_type": name, **settings, "resample": 2})
        wrong = other.arrays(image, layout)["pixel_values"]
    elif fault == "BGR":
        red, green, blue = image.split()
        wrong = processor.arrays(Image.merge("RGB", (blue, green, red)), layout)["pixel_values"]
    else:
        wrong = right[::-1]
    assert abs(wrong - right).max() > 0.05
