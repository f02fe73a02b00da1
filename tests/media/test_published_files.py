"""Files as models are published with them: none of their keys is refused, and the numbers of tokens
are those that the models' own pages give.
"""

import json

import pytest

from quire.media.picture_files import read_picture_settings

RESCALED = {"do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    **RESCALED,
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **RESCALED}
FAST = {
    "crop_size": None,
    "data_format": "channels_first",
    "default_to_square": True,
    "device": None,
    "disable_grouping": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "do_resize": True,
    "input_data_format": None,
    "return_tensors": None,
    "do_pad": None,
}

LLAVA = (
    {
        **CLIP,
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
    },
    {
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "processor_class": "LlavaProcessor",
        "vision_feature_select_strategy": "default",
    },
    {},
)
OLD_LLAVA = (LLAVA[0] | {"processor_class": "LlavaProcessor"}, {}, {})
NEXT = (
    {
        **LLAVA[0],
        "aspect_ratio_setting": "anyres",
        "do_pad": True,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_processor_type": "LlavaNextImageProcessor",
    },
    LLAVA[1] | {"processor_class": "LlavaNextProcessor"},
    {},
)
QWEN2_5 = (
    {
        **CLIP,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
    {},
    {},
)
QWEN3 = (
    {
        **HALVES,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    {},
    {},
)
GEMMA3 = (
    {
        **HALVES,
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "do_resize": True,
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 256,
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "size": {"height": 896, "width": 896},
    },
    {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
    {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)
SMOLVLM = (
    {
        **HALVES,
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_pad": True,
        "do_resize": True,
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": 512},
        "resample": 1,
        "size": {"longest_edge": 2048},
        "processor_class": "Idefics3Processor",
    },
    {"image_seq_len": 64, "processor_class": "Idefics3Processor"},
    {},
)
MISTRAL3 = (
    {
        **FAST,
        **CLIP,
        "image_processor_type": "PixtralImageProcessorFast",
        "patch_size": 14,
        "processor_class": "PixtralProcessor",
        "resample": 3,
        "size": {"longest_edge": 1540},
    },
    {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "processor_class": "PixtralProcessor",
    },
    {},
)
INTERNVL = (
    {
        **FAST,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        **RESCALED,
        "crop_to_patches": False,
        "max_patches": 12,
        "min_patches": 1,
        "resample": 3,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "processor_class": "InternVLProcessor",
        "size": {"height": 448, "width": 448},
    },
    {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    {
        "extra_special_tokens": {
            "context_image_token": "<IMG_CONTEXT>",
            "end_image_token": "</img>",
            "start_image_token": "<img>",
            "video_token": "<video>",
        }
    },
)
LFM2 = (
    {
        **FAST,
        **HALVES,
        "do_image_splitting": True,
        "do_pad": True,
        "downsample_factor": 2,
        "resample": 2,
        "encoder_patch_size": 16,
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "max_image_tokens": 256,
        "max_num_patches": 1024,
        "max_pixels_tolerance": 2.0,
        "max_tiles": 10,
        "min_image_tokens": 64,
        "min_tiles": 2,
        "pad_size": None,
        "processor_class": "Lfm2VlProcessor",
        "return_row_col_info": True,
        "size": {"height": 512, "width": 512},
        "tile_size": 512,
        "use_thumbnail": True,
    },
    {},
    {},
)
LLAMA4 = (
    {
        **FAST,
        **HALVES,
        "image_processor_type": "Llama4ImageProcessorFast",
        "max_patches": 16,
        "processor_class": "Llama4Processor",
        "resample": 2,
        "resize_to_max_canvas": False,
        "size": {"height": 336, "width": 336},
    },
    {
        "fake_image_token": "<|image|>",
        "image_token": "<|image|>",
        "patch_size": 14,
        "processor_class": "Llama4Processor",
    },
    {},
)
GLM4V = (
    {
        **CLIP,
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        "do_resize": True,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
    },
    {},
    {},
)
ONEVISION = (
    {
        **HALVES,
        "do_convert_rgb": True,
        "do_pad": True,
        "do_resize": True,
        "resample": 3,
        "image_grid_pinpoints": [[384 * r, 384 * c] for r in range(1, 7) for c in range(1, 7)],
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": 384, "width": 384},
    },
    {
        "image_token": "<image>",
        "num_image_tokens": 729,
        "video_token": "<video>",
        "processor_class": "LlavaOnevisionProcessor",
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_select_strategy": "full",
    },
    {},
)

PUBLISHED = [
    ("LLaVA 1.5", LLAVA, (480, 640), 576),
    ("LLaVA 1.5 of an early release", OLD_LLAVA, (480, 640), 576),
    ("LLaVA-NeXT", NEXT, (672, 672), 576 + 48 * 48 + 48),
    ("Qwen2.5-VL", QWEN2_5, (1000, 1000), 36 * 36),
    ("Qwen3-VL", QWEN3, (1024, 512), 32 * 16),
    ("Gemma 3", GEMMA3, (100, 3000), 256),
    ("SmolVLM", SMOLVLM, (1024, 2048), (2 * 4 + 1) * 64),
    ("Mistral Small 3.1", MISTRAL3, (1540, 770), 55 * 28),
    ("InternVL 3", INTERNVL, (896, 896), (4 + 1) * 256),
    ("LFM2-VL", LFM2, (512, 512), 256),
    ("LFM2-VL in tiles", LFM2, (1024, 1024), 4 * 256 + 256),
    ("Llama 4", LLAMA4, (336, 336), 144),
    ("Llama 4 in tiles", LLAMA4, (672, 672), (4 + 1) * 144),
    ("GLM-4.1V", GLM4V, (560, 560), 20 * 20),
    ("LLaVA-OneVision", ONEVISION, (384, 384), 729 + 729 + 27),
]


@pytest.mark.parametrize(
    ("files", "size", "rows"), [each[1:] for each in PUBLISHED], ids=[each[0] for each in PUBLISHED]
)
def test_published_files_are_read(tmp_path, files, size, rows):
    names = ("preprocessor_config", "processor_config", "tokenizer_config")
    for name, values in zip(names, files, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    config = {
        "vision_config": {"patch_size": 14},
        "vision_feature_select_strategy": "default",
    }
    settings = read_picture_settings(tmp_path, config)
    picture = settings.rule.expanded(settings.read().layout(*size))
    assert picture.num_rows == rows
    assert picture.text.count(settings.rule.soft_token) == len(picture.runs)
