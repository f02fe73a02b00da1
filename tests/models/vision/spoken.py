"""Folders of small models that take pictures, with all that an engine reads: weights, tokenizer and
processor files; and transformers' answers to their prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.models.vision.wholes import (
    TEXT,
    TOWER,
    Whole,
    of_idefics,
    padded,
    stacked,
    tiled,
    with_grids,
    write_model,
)

PAD, START, END, IMAGE = "<pad>", "<|vision_start|>", "<|vision_end|>", "<image>"
WORDS = [f"w{i}" for i in range(TEXT["vocab_size"] - 4)]
IMAGE_ID = 3
_MEAN = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}

CLIP_FILES = {
    "image_processor_type": "CLIPImageProcessor",
    "do_center_crop": True,
    "size": {"shortest_edge": 24},
    "crop_size": {"height": 24, "width": 24},
    **_MEAN,
}
LLAVA_FILES = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "patch_size": 6,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
QWEN_FILES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 64,
    "max_pixels": 1024,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    **_MEAN,
}
LONG_TEXT = {
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3}
PINPOINTS = [[24, 48], [48, 24]]
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 6,
    "image_size": 48,
}
PIXTRAL_FILES = {
    "processor_class": "PixtralProcessor",
    "patch_size": 6,
    "spatial_merge_size": 1,
    "image_token": IMAGE,
    "image_break_token": "w30",
    "image_end_token": "w31",
}
PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 24},
    "patch_size": {"height": 6, "width": 6},
    **_MEAN,
}
QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 2, 2]}
QWEN_IDS = {"image_token_id": IMAGE_ID, "vision_start_token_id": 1, "vision_end_token_id": 2}

SPOKEN: dict[str, tuple[Whole, dict[str, Any], dict[str, Any]]] = {
    "llava": (
        Whole("llava", CLIP, stacked, text=LONG_TEXT, keys={"image_token_index": IMAGE_ID}),
        LLAVA_FILES,
        CLIP_FILES,
    ),
    "qwen2_vl": (
        Whole(
            "qwen2_vl",
            QWEN_TOWER | {"embed_dim": 32, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2},
            with_grids,
            text=LONG_TEXT | {"rope_parameters": QWEN_ROPE},
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen2VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "qwen2_5_vl": (
        Whole(
            "qwen2_5_vl",
            QWEN_TOWER
            | {
                "hidden_size": 32,
                "out_hidden_size": TEXT["hidden_size"],
                "intermediate_size": 20,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            with_grids,
            text=LONG_TEXT | {"rope_parameters": QWEN_ROPE},
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen2_5_VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "llava_next": (
        Whole(
            "llava_next",
            CLIP,
            tiled,
            text=LONG_TEXT,
            keys={"image_token_index": IMAGE_ID, "image_grid_pinpoints": PINPOINTS},
        ),
        LLAVA_FILES | {"processor_class": "LlavaNextProcessor"},
        CLIP_FILES
        | {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "pixtral": (
        Whole(
            "llava",
            PIXTRAL,
            padded,
            text=LONG_TEXT,
            keys={
                "image_token_index": IMAGE_ID,
                "vision_feature_select_strategy": "full",
                "vision_feature_layer": -1,
            },
        ),
        PIXTRAL_FILES,
        PIXTRAL_IMAGES,
    ),
    "mistral3": (
        Whole("mistral3", PIXTRAL, padded, text=LONG_TEXT, keys={"image_token_index": IMAGE_ID}),
        PIXTRAL_FILES | {"spatial_merge_size": 2},
        PIXTRAL_IMAGES | {"size": {"longest_edge": 48}},
    ),
    "idefics3": (
        Whole("idefics3", TOWER, of_idefics, text=LONG_TEXT, keys={"image_token_id": IMAGE_ID}),
        {"processor_class": "Idefics3Processor", "image_seq_len": 4, "image_token": IMAGE},
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 40},
            "max_image_size": {"longest_edge": 24},
            **_MEAN,
        },
    ),
    "qwen3_5": (
        Whole(
            "qwen3_5",
            QWEN_TOWER
            | {
                "hidden_size": 32,
                "out_hidden_size": TEXT["hidden_size"],
                "intermediate_size": 20,
                "num_position_embeddings": 25,
            },
            with_grids,
            text=LONG_TEXT
            | {
                "num_hidden_layers": 3,
                "head_dim": 24,
                "linear_conv_kernel_dim": 3,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 12,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "rope_parameters": QWEN_ROPE
                | {
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen3VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "qwen3_vl": (
        Whole(
            "qwen3_vl",
            QWEN_TOWER
            | {
                "hidden_size": 32,
                "out_hidden_size": TEXT["hidden_size"],
                "intermediate_size": 20,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 1],
            },
            with_grids,
            text=LONG_TEXT
            | {"num_hidden_layers": 3, "rope_parameters": QWEN_ROPE | {"mrope_interleaved": True}},
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen3VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "llava_onevision": (
        Whole(
            "llava_onevision",
            TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
            tiled,
            text=LONG_TEXT,
            keys={
                "image_token_index": IMAGE_ID,
                "image_grid_pinpoints": PINPOINTS,
                "vision_feature_select_strategy": "full",
                "vision_feature_layer": -1,
                "vision_aspect_ratio": "anyres_max_1",
            },
        ),
        {
            "processor_class": "LlavaOnevisionProcessor",
            "image_token": IMAGE,
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_1",
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": PINPOINTS,
            "size": {"height": 24, "width": 24},
            **_MEAN,
        },
    ),
    "internvl": (
        Whole(
            "internvl",
            TOWER | {"image_size": [24, 24], "patch_size": [6, 6]},
            stacked,
            text=LONG_TEXT,
            keys={"image_token_id": IMAGE_ID},
        ),
        {
            "processor_class": "InternVLProcessor",
            "image_seq_length": 4,
            "context_image_token": IMAGE,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 24, "width": 24},
            "max_patches": 3,
            **_MEAN,
        },
    ),
}


def write_spoken(name: str, folder: Path) -> torch.nn.Module:
    """Write all files; returns transformers' model."""
    whole, processor, image = SPOKEN[name]
    model = write_model(whole, folder)
    vocab = {token: i for i, token in enumerate([PAD, START, END, IMAGE, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, START, END, IMAGE])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"},
        "processor_config.json": processor,
        "preprocessor_config.json": image,
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return model


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Coloured squares."""
    cells = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)


def greedy_after(
    model: torch.nn.Module, prompt: list[int], inputs: dict[str, Any], tokens: list[int]
) -> tuple[list[int], torch.Tensor]:
    """transformers' likeliest token after the prompt and after each of `tokens` but the last, apart
    from the placeholder, and the log-probabilities of `tokens`; `inputs` are those of the pictures.
    """
    ids = torch.tensor([prompt + tokens[:-1]])
    kinds = {"mm_token_type_ids": (ids == IMAGE_ID).int()} if "image_grid_thw" in inputs else {}
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs, **kinds).logits[0]
    after = logits[len(prompt) - 1 :].log_softmax(-1)
    words = after.index_fill(1, torch.tensor([IMAGE_ID]), float("-inf"))
    return words.argmax(-1).tolist(), after[torch.arange(len(tokens)), torch.tensor(tokens)]
