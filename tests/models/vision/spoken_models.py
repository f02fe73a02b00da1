"""Small models that take pictures, with the files of their processors, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.models.vision import wholes
from tests.models.vision.wholes import (
    AYA_KEYS,
    FULL_LAST,
    LFM2_TOWER,
    LLAMA4_TOWER,
    TEXT,
    TOWER,
    WIDTH,
    Whole,
    in_squares,
    of_gemma4,
    of_idefics,
    of_lfm2,
    padded,
    stacked,
    tiled,
    with_grids,
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
KIMI_TEXT = LONG_TEXT | wholes.DEEPSEEK_TEXT
KIMI_KEYS = {
    "image_token_id": IMAGE_ID,
    "projection_hidden_size": 32,
    "projection_layer_norm_eps": 0.05,
}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
CLIP = TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3}
PINPOINTS = [[24, 48], [48, 24]]
PIXTRAL = wholes.PIXTRAL | {"num_hidden_layers": 2, "image_size": 48}
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
QWEN3_TOWER = wholes.QWEN3_TOWER | {"depth": 2}
QWEN3_FILES = {"processor_class": "Qwen3VLProcessor", "image_token": IMAGE}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 2, 2]}
GLM_TOWER = wholes.GLM_TOWER | {"depth": 2}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 50.0,
    "mrope_section": [1, 1, 1],
    "partial_rotary_factor": 0.5,
}
GLM_IDS = {"image_token_id": IMAGE_ID, "image_start_token_id": 1, "image_end_token_id": 2}
GLM_FILES = QWEN_FILES | {
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 2048},
}
QWEN_IDS = {"image_token_id": IMAGE_ID, "vision_start_token_id": 1, "vision_end_token_id": 2}
GEMMA_NAMES = {"image_token": IMAGE, "boi_token": "<|begin|>", "eoi_token": "<|end|>"}
GEMMA_TEXT = LONG_TEXT | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "query_pre_attn_scalar": 7,
}
GEMMA4_TOWER = wholes.GEMMA4_TOWER | {"patch_size": 4, "position_embedding_size": 320}
GEMMA4_TEXT = LONG_TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 3,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": TEXT["vocab_size"],
}
GEMMA4_IMAGES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
SQUARE = {"size": {"height": 24, "width": 24}, **_MEAN}
PALIGEMMA_TOWER = SIGLIP | {"projection_dim": WIDTH}
PALIGEMMA_KEYS = {"projection_dim": WIDTH, "image_token_index": IMAGE_ID}
PALIGEMMA_IMAGES = SQUARE | {
    "image_processor_type": "SiglipImageProcessor",
    "image_seq_length": 16,
}
TILES = SQUARE | {"image_processor_type": "GotOcr2ImageProcessor", "max_patches": 3}
IDEFICS = {"size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 24}, **_MEAN}


@dataclass(frozen=True)
class Spoken:
    """A model, its processor_config.json and its preprocessor_config.json. `placeholder` stands for
    a picture in a prompt, `soft` is the token that its rows stand at, `tokens` are further ones of
    its vocabulary, `names` those that the tokenizer has names for. Its test has models of `length`
    tokens, steps of `chunk` tokens, and `num_blocks`, which are few; `is_found`: prompts are found
    in the prefix cache.
    """

    whole: Whole
    processor: dict[str, Any]
    image: dict[str, Any]
    placeholder: str = IMAGE
    soft: str = IMAGE
    tokens: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    length: int = 128
    chunk: int = 7
    is_found: bool = True
    num_blocks: int = 36


SPOKEN: dict[str, Spoken] = {
    "llava": Spoken(
        Whole("llava", CLIP, stacked, text=LONG_TEXT, keys={"image_token_index": IMAGE_ID}),
        LLAVA_FILES,
        CLIP_FILES,
    ),
    "qwen2_vl": Spoken(
        Whole(
            "qwen2_vl",
            wholes.QWEN2_TOWER | {"depth": 2},
            with_grids,
            text=LONG_TEXT | {"rope_parameters": QWEN_ROPE},
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen2VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "qwen2_5_vl": Spoken(
        Whole(
            "qwen2_5_vl",
            wholes.QWEN2_5_TOWER | {"depth": 2, "window_size": 16},
            with_grids,
            text=LONG_TEXT | {"rope_parameters": QWEN_ROPE},
            keys=QWEN_IDS,
        ),
        {"processor_class": "Qwen2_5_VLProcessor", "image_token": IMAGE},
        QWEN_FILES,
    ),
    "llava_next": Spoken(
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
    "llava_next_video": Spoken(
        Whole(
            "llava_next_video",
            CLIP,
            tiled,
            text=LONG_TEXT,
            keys={"image_token_index": IMAGE_ID, "image_grid_pinpoints": PINPOINTS},
        ),
        LLAVA_FILES | {"processor_class": "LlavaNextVideoProcessor"},
        CLIP_FILES
        | {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "vipllava": Spoken(
        Whole(
            "vipllava",
            CLIP,
            stacked,
            text=LONG_TEXT,
            keys={"image_token_index": IMAGE_ID, "vision_feature_layer": [-2, 1]},
        ),
        LLAVA_FILES,
        CLIP_FILES,
    ),
    "pixtral": Spoken(
        Whole(
            "llava",
            PIXTRAL,
            padded,
            text=LONG_TEXT,
            keys=FULL_LAST | {"image_token_index": IMAGE_ID},
        ),
        PIXTRAL_FILES,
        PIXTRAL_IMAGES,
    ),
    "mistral3": Spoken(
        Whole("mistral3", PIXTRAL, padded, text=LONG_TEXT, keys={"image_token_index": IMAGE_ID}),
        PIXTRAL_FILES | {"spatial_merge_size": 2},
        PIXTRAL_IMAGES | {"size": {"longest_edge": 48}},
    ),
    "mistral_large4": Spoken(
        Whole(
            "mistral_large4",
            PIXTRAL,
            padded,
            text=LONG_TEXT | wholes.LARGE4_TEXT | {"num_hidden_layers": 4},
            keys={"image_token_index": IMAGE_ID},
        ),
        PIXTRAL_FILES | {"spatial_merge_size": 2},
        PIXTRAL_IMAGES | {"size": {"longest_edge": 48}},
    ),
    "idefics3": Spoken(
        Whole("idefics3", TOWER, of_idefics, text=LONG_TEXT, keys={"image_token_id": IMAGE_ID}),
        {"processor_class": "Idefics3Processor", "image_seq_len": 4, "image_token": IMAGE},
        IDEFICS | {"image_processor_type": "Idefics3ImageProcessor"},
    ),
    "qwen3_5": Spoken(
        Whole(
            "qwen3_5",
            QWEN3_TOWER,
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
                | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
            },
            keys=QWEN_IDS,
        ),
        QWEN3_FILES,
        QWEN_FILES,
    ),
    "qwen3_vl": Spoken(
        Whole(
            "qwen3_vl",
            QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]},
            with_grids,
            text=LONG_TEXT
            | {"num_hidden_layers": 3, "rope_parameters": QWEN_ROPE | {"mrope_interleaved": True}},
            keys=QWEN_IDS,
        ),
        QWEN3_FILES,
        QWEN_FILES,
    ),
    "qwen3_vl_moe": Spoken(
        Whole(
            "qwen3_vl_moe",
            QWEN3_TOWER | {"deepstack_visual_indexes": [1, 0]},
            with_grids,
            text=LONG_TEXT
            | {
                "num_hidden_layers": 3,
                "rope_parameters": QWEN_ROPE | {"mrope_interleaved": True},
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "decoder_sparse_step": 1,
            },
            keys=QWEN_IDS,
        ),
        QWEN3_FILES,
        QWEN_FILES,
    ),
    "glm4v": Spoken(
        Whole(
            "glm4v",
            GLM_TOWER,
            with_grids,
            text=LONG_TEXT | {"rope_parameters": GLM_ROPE},
            keys=GLM_IDS,
        ),
        {"processor_class": "Glm4vProcessor", "image_token": IMAGE},
        GLM_FILES,
    ),
    "glm46v": Spoken(
        Whole(
            "glm46v",
            GLM_TOWER,
            with_grids,
            text=LONG_TEXT | {"rope_parameters": GLM_ROPE},
            keys=GLM_IDS,
        ),
        {"processor_class": "Glm46VProcessor", "image_token": IMAGE},
        GLM_FILES | {"image_processor_type": "Glm46VImageProcessor"},
    ),
    "glm_ocr": Spoken(
        Whole(
            "glm_ocr",
            wholes.WIDE_TOWER | {"depth": 2, "rms_norm_eps": 0.04},
            with_grids,
            text=LONG_TEXT
            | {
                "rope_parameters": GLM_ROPE
                | {"mrope_section": [2, 1, 3]}
                | {"partial_rotary_factor": 1.0}
            },
            keys=GLM_IDS,
        ),
        {"processor_class": "Glm46VProcessor", "image_token": IMAGE},
        GLM_FILES | {"image_processor_type": "Glm46VImageProcessor"},
    ),
    "paddleocr_vl": Spoken(
        Whole(
            "paddleocr_vl",
            TOWER | {"patch_size": 4, "num_hidden_layers": 2},
            in_squares,
            text=LONG_TEXT | {"rope_parameters": QWEN_ROPE | {"mrope_section": [1, 2, 3]}},
            keys=QWEN_IDS,
        ),
        {"processor_class": "PaddleOCRVLProcessor"},
        QWEN_FILES
        | {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1},
        names={"image_token": IMAGE},
    ),
    "kimi_k25": Spoken(
        Whole(
            "kimi_k25",
            wholes.KIMI_TOWER | {"num_hidden_layers": 2},
            in_squares,
            text=KIMI_TEXT,
            keys=KIMI_KEYS,
            published=wholes.KIMI_NAMES,
            config={
                "vision_config": {
                    "init_pos_emb_height": 5,
                    "init_pos_emb_time": 4,
                    "init_pos_emb_width": 5,
                    "merge_kernel_size": [2, 2],
                    "merge_type": "sd2_tpool",
                    "mm_hidden_size": 32,
                    "mm_projector_type": "patchmerger",
                    "model_type": "",
                    "patch_size": 6,
                    "pos_emb_type": "divided_fixed",
                    "projector_hidden_act": "gelu",
                    "projector_ln_eps": 0.05,
                    "text_hidden_size": WIDTH,
                    "video_attn_type": "spatial_temporal",
                    "vt_hidden_size": 32,
                    "vt_intermediate_size": 20,
                    "vt_num_attention_heads": 2,
                    "vt_num_hidden_layers": 2,
                }
            },
        ),
        {},
        {
            "processor_class": "KimiK25Processor",
            "media_proc_cfg": {
                "in_patch_limit": 30,
                "patch_size": 6,
                "image_mean": _MEAN["image_mean"],
                "image_std": _MEAN["image_std"],
                "merge_kernel_size": 2,
                "fixed_output_tokens": None,
                "patch_limit_on_one_side": 512,
            },
        },
        names={"image_token": IMAGE},
    ),
    "kimi_vl": Spoken(
        Whole(
            "kimi_k25",
            wholes.KIMI_TOWER | {"num_hidden_layers": 2},
            in_squares,
            text=KIMI_TEXT,
            keys=KIMI_KEYS | {"projection_layer_norm_eps": 1e-5},
            published=wholes.KIMI_NAMES
            | {"mm_projector": "multi_modal_projector"}
            | {"proj.0": "linear_1", "proj.2": "linear_2"},
            config={
                "architectures": ["KimiVLForConditionalGeneration"],
                "media_placeholder_token_id": IMAGE_ID,
                "model_type": "kimi_vl",
                "vision_config": {
                    "hidden_size": 32,
                    "init_pos_emb_height": 5,
                    "init_pos_emb_width": 5,
                    "intermediate_size": 20,
                    "merge_kernel_size": [2, 2],
                    "model_type": "moonvit",
                    "num_attention_heads": 2,
                    "num_hidden_layers": 2,
                    "patch_size": 6,
                },
            },
        ),
        {},
        {
            "image_processor_type": "KimiVLImageProcessor",
            "processor_class": "KimiVLProcessor",
            "in_token_limit": 30,
            "merge_kernel_size": [2, 2],
            "num_pooled_tokens": 1024,
            "pad_input": True,
            "patch_size": 6,
            **_MEAN,
        },
        names={"image_token": IMAGE},
    ),
    "lighton_ocr": Spoken(
        Whole(
            "lighton_ocr",
            PIXTRAL,
            padded,
            text=LONG_TEXT | {"model_type": "qwen3"},
            keys={"image_token_id": IMAGE_ID},
        ),
        {"processor_class": "LightOnOcrProcessor", "patch_size": 6, "spatial_merge_size": 2},
        PIXTRAL_IMAGES | {"size": {"longest_edge": 48}},
        names={"image_token": IMAGE},
    ),
    "glm4v_moe": Spoken(
        Whole(
            "glm4v_moe",
            GLM_TOWER,
            with_grids,
            text=LONG_TEXT
            | {
                "num_hidden_layers": 3,
                "rope_parameters": GLM_ROPE,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.5,
                "n_group": 2,
                "topk_group": 1,
            },
            keys=GLM_IDS,
        ),
        {"processor_class": "Glm4vProcessor", "image_token": IMAGE},
        GLM_FILES,
    ),
    "gemma3": Spoken(
        Whole(
            "gemma3",
            SIGLIP,
            stacked,
            text=GEMMA_TEXT,
            keys={"mm_tokens_per_image": 4, "image_token_id": IMAGE_ID},
        ),
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        SQUARE | {"image_processor_type": "Gemma3ImageProcessor"},
        placeholder="<|begin|>",
        tokens=("<|begin|>", "<|end|>"),
        names=GEMMA_NAMES,
        num_blocks=48,
    ),
    "gemma4": Spoken(
        Whole(
            "gemma4",
            GEMMA4_TOWER,
            of_gemma4,
            text=GEMMA4_TEXT,
            keys={"image_token_id": IMAGE_ID},
        ),
        {"processor_class": "Gemma4Processor"},
        GEMMA4_IMAGES,
        tokens=("<|begin|>", "<|end|>"),
        names=GEMMA_NAMES,
        length=192,
        num_blocks=100,
    ),
    "gemma4_spans": Spoken(
        Whole(
            "gemma4",
            GEMMA4_TOWER,
            of_gemma4,
            text=GEMMA4_TEXT
            | {
                "use_bidirectional_attention": "vision",
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
            },
            keys={"image_token_id": IMAGE_ID},
        ),
        {"processor_class": "Gemma4Processor"},
        GEMMA4_IMAGES,
        placeholder=f"{IMAGE} w7 w8 w9",  # a block ends between the picture and the last token
        tokens=("<|begin|>", "<|end|>"),
        names=GEMMA_NAMES,
        length=192,
        chunk=70,
        num_blocks=100,
    ),
    "paligemma": Spoken(
        Whole(
            "paligemma",
            PALIGEMMA_TOWER,
            stacked,
            text=LONG_TEXT | {"model_type": "gemma"},
            keys=PALIGEMMA_KEYS,
        ),
        {"processor_class": "PaliGemmaProcessor"},
        PALIGEMMA_IMAGES,
        tokens=("<bos>",),
        chunk=48,
        is_found=False,
    ),
    "paligemma2": Spoken(
        Whole(
            "paligemma",
            PALIGEMMA_TOWER,
            stacked,
            text=LONG_TEXT
            | {
                "model_type": "gemma2",
                "sliding_window": 9,
                "query_pre_attn_scalar": 7,
                "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 2.5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            keys=PALIGEMMA_KEYS,
        ),
        {"processor_class": "PaliGemmaProcessor"},
        PALIGEMMA_IMAGES,
        tokens=("<bos>",),
        chunk=48,
        is_found=False,
        num_blocks=44,
    ),
    "llava_onevision": Spoken(
        Whole(
            "llava_onevision",
            SIGLIP,
            tiled,
            text=LONG_TEXT,
            keys=FULL_LAST
            | {
                "image_token_index": IMAGE_ID,
                "image_grid_pinpoints": PINPOINTS,
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
        SQUARE
        | {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
    "internvl": Spoken(
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
        TILES,
    ),
    "smolvlm": Spoken(
        Whole("smolvlm", TOWER, of_idefics, text=LONG_TEXT, keys={"image_token_id": IMAGE_ID}),
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4, "image_token": IMAGE},
        IDEFICS | {"image_processor_type": "SmolVLMImageProcessor"},
    ),
    "aya_vision": Spoken(
        Whole(
            "aya_vision",
            SIGLIP,
            stacked,
            text=LONG_TEXT,
            keys=AYA_KEYS | {"image_token_index": IMAGE_ID},
        ),
        {
            "processor_class": "AyaVisionProcessor",
            "image_token": IMAGE,
            "patch_size": 6,
            "img_size": 24,
            "downsample_factor": 2,
        },
        TILES,
        soft="<|IMG_PATCH|>",
        tokens=(IMAGE, "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_1", "TILE_GLOBAL"),
    ),
    "cohere2_vision": Spoken(
        Whole(
            "cohere2_vision",
            SIGLIP,
            stacked,
            text=LONG_TEXT,
            keys={"image_token_id": IMAGE_ID, "alignment_intermediate_size": 20},
        ),
        {"processor_class": "Cohere2VisionProcessor"},
        TILES | {"image_processor_type": "Cohere2VisionImageProcessorFast", "patch_size": 2},
        tokens=("<|begin|>", "<|end|>", "<|line|>"),
        names={
            "image_token": IMAGE,
            "boi_token": "<|begin|>",
            "eoi_token": "<|end|>",
            "img_line_break_token": "<|line|>",
        },
    ),
    "lfm2_vl": Spoken(
        Whole(
            "lfm2_vl",
            LFM2_TOWER,
            of_lfm2,
            text=LONG_TEXT,
            keys={"image_token_id": IMAGE_ID, "projector_hidden_size": 18},
        ),
        {"processor_class": "Lfm2VlProcessor", "image_token": IMAGE},
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "tile_size": 24,
            "encoder_patch_size": 6,
            "downsample_factor": 2,
            "min_image_tokens": 2,
            "max_image_tokens": 6,
            "max_num_patches": 24,
            **_MEAN,
        },
    ),
    "llama4": Spoken(
        Whole(
            "llama4",
            LLAMA4_TOWER,
            stacked,
            text=LONG_TEXT,
            keys={"image_token_index": IMAGE_ID},
        ),
        {
            "processor_class": "Llama4Processor",
            "patch_size": 6,
            "pixel_shuffle_ratio": 0.5,
        },
        TILES | {"image_processor_type": "Llama4ImageProcessorFast"},
        placeholder="<|image|>",
        soft="<|patch|>",
        tokens=(
            *("<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
    ),
}
