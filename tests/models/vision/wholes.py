"""Small random models that take pictures, with values that hide nothing, and their pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.models.vision.pictures import Picture

WIDTH = 24
"""Of the decoders' hidden states."""
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "head_dim": 12,
    "rms_norm_eps": 0.03,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
QWEN_TOWER = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """A model: its type, the keys of its parts, and how pictures reach it: `show` makes the keyword
    arguments of `get_image_features` of some pictures. `published`: what stands in names of files
    for what transformers writes; `config`: what stands in config.json.
    """

    kind: str
    vision: dict[str, Any]
    show: Callable[[list[Picture]], Inputs] = dict
    pictures: Callable[[], list[Picture]] = list
    text: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frames(*counts: int, height: int = 24, width: int = 24) -> Callable[[], list[Picture]]:
    """Pictures of so many frames."""
    return lambda: [
        Picture(randn(count, 3, height, width, seed=i)) for i, count in enumerate(counts)
    ]


def stacked(pictures: list[Picture]) -> Inputs:
    return {"pixel_values": torch.cat([p.pixels for p in pictures])}


def cut(*grids: tuple[int, int, int], values: int) -> Callable[[], list[Picture]]:
    """Pictures that come as patches of so many values."""
    return lambda: [
        Picture(randn(t * h * w, values, seed=i), ((h, w),) * t)
        for i, (t, h, w) in enumerate(grids)
    ]


def with_grids(pictures: list[Picture]) -> Inputs:
    return {
        "pixel_values": torch.cat([p.pixels for p in pictures]),
        "image_grid_thw": torch.tensor([(len(p.frames), *p.frames[0]) for p in pictures]),
    }


def in_squares(pictures: list[Picture]) -> Inputs:
    """Patches as PaddleOCR-VL and Kimi get them."""
    found = with_grids(pictures)
    values = found["pixel_values"]
    side = round((values.shape[1] / 3) ** 0.5)
    return found | {"pixel_values": values.unflatten(1, (3, side, side))}


def padded(pictures: list[Picture]) -> Inputs:
    """Pictures of several sizes as Pixtral gets them."""
    sizes = [tuple(p.pixels.shape[2:]) for p in pictures]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    pixels = torch.zeros(len(pictures), 3, height, width)
    for i, picture in enumerate(pictures):
        pixels[i, :, : sizes[i][0], : sizes[i][1]] = picture.pixels[0]
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def of_sizes(*sizes: tuple[int, int]) -> Callable[[], list[Picture]]:
    return lambda: [Picture(randn(1, 3, *size, seed=i)) for i, size in enumerate(sizes)]


def tiled(pictures: list[Picture]) -> Inputs:
    """Pictures of several numbers of tiles as LLaVA-NeXT gets them."""
    most = max(len(p.pixels) for p in pictures)
    pixels = torch.zeros(len(pictures), most, *pictures[0].pixels.shape[1:])
    for i, picture in enumerate(pictures):
        pixels[i, : len(picture.pixels)] = picture.pixels
    return {"pixel_values": pixels, "image_sizes": torch.tensor([p.size for p in pictures])}


def tiles(*of: tuple[int, tuple[int, int]]) -> Callable[[], list[Picture]]:
    """Pictures of so many tiles and of these sizes."""
    return lambda: [
        Picture(randn(count, 3, 24, 24, seed=i), size=size) for i, (count, size) in enumerate(of)
    ]


def of_idefics(pictures: list[Picture]) -> Inputs:
    most = max(len(p.pixels) for p in pictures)
    pixels = torch.zeros(len(pictures), most, *pictures[0].pixels.shape[1:])
    for i, picture in enumerate(pictures):
        pixels[i, : len(picture.pixels)] = picture.pixels
    return {"pixel_values": pixels}


def of_lfm2(pictures: list[Picture]) -> Inputs:
    most = max(len(p.pixels) for p in pictures)
    pixels = torch.zeros(len(pictures), most, pictures[0].pixels.shape[1])
    mask = torch.zeros(len(pictures), most, dtype=torch.long)
    for i, picture in enumerate(pictures):
        pixels[i, : len(picture.pixels)] = picture.pixels
        mask[i, : len(picture.pixels)] = 1
    shapes = torch.tensor([p.frames[0] for p in pictures])
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def of_gemma4(pictures: list[Picture]) -> Inputs:
    most = max(len(p.pixels) for p in pictures)
    pixels = torch.zeros(len(pictures), most, pictures[0].pixels.shape[1])
    places = torch.full((len(pictures), most, 2), -1)
    for i, picture in enumerate(pictures):
        [(height, width)] = picture.frames
        pixels[i, : len(picture.pixels)] = picture.pixels
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places[i, : len(picture.pixels)] = torch.stack((columns, rows), -1).flatten(0, 1)
    return {"pixel_values": pixels, "image_position_ids": places}


QWEN2_TOWER = QWEN_TOWER | {"embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2}
WIDE_TOWER = QWEN_TOWER | {"hidden_size": 32, "out_hidden_size": WIDTH, "intermediate_size": 20}
QWEN2_5_TOWER = WIDE_TOWER | {"fullatt_block_indexes": [1]}
QWEN3_TOWER = WIDE_TOWER | {"num_position_embeddings": 25}
GLM_TOWER = WIDE_TOWER | {"image_size": 20, "rms_norm_eps": 0.04}
ANY_SIZE = {key: value for key, value in TOWER.items() if key != "image_size"}
NORMED = TOWER | {"layer_norm_eps": 0.05}
CLIP = NORMED | {"model_type": "clip_vision_model", "num_hidden_layers": 4}
SIGLIP = NORMED | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}
LFM2_TOWER = ANY_SIZE | {
    "model_type": "siglip2_vision_model",
    "num_patches": 25,
    "layer_norm_eps": 0.05,
    "vision_use_head": False,
}
LLAMA4_TOWER = TOWER | {
    "vision_output_dim": 28,
    "projector_input_dim": 28,
    "projector_output_dim": 28,
    "intermediate_size": 128,
}
GEMMA4_TOWER = ANY_SIZE | {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 0.05,
    "pooling_kernel_size": 2,
    "position_embedding_size": 20,
}
KIMI_TOWER = ANY_SIZE | {"pos_emb_height": 5, "pos_emb_width": 5}
KIMI_NAMES = {
    "vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
    "model.mm_projector": "mm_projector",
    "language_model.model.blocks": "language_model.model.layers",
}
"""Published files have these, which transformers does not make of its own names again."""
DEEPSEEK_TEXT = {
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
LARGE4_TEXT = {key: value for key, value in DEEPSEEK_TEXT.items() if key != "q_lora_rank"} | {
    "kv_lora_rank": 12,
    "index_n_heads": 24,
    "index_head_dim": 10,
    "index_topk": 9,
}
FULL_LAST = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
AYA_KEYS = FULL_LAST | {"alignment_intermediate_size": 20, "adapter_layer_norm_eps": 0.02}
PINPOINTS = [[24, 48], [48, 24], [48, 48], [24, 72]]
_SIZES = of_sizes((24, 12), (12, 36), (24, 24))
_STILLS = ((1, 4, 6), (1, 2, 2), (1, 10, 14))
"""transformers 5.24 counts frames of GLM-4V as pictures, and fails for two of a picture."""
_GRIDS = ((1, 4, 6), (1, 2, 2), (2, 8, 4), (1, 10, 14))

WHOLES: dict[str, Whole] = {
    "llava": Whole("llava", CLIP, stacked, frames(1, 1, 1)),
    "llava-full": Whole(
        "llava",
        CLIP | {"hidden_act": "gelu"},
        stacked,
        frames(1, 1),
        keys={
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [1, -1],
            "projector_hidden_act": "relu",
            "multimodal_projector_bias": False,
        },
    ),
    "llava-siglip": Whole(
        "llava",
        SIGLIP,
        stacked,
        frames(1, 1),
        keys=FULL_LAST,
    ),
    "llava-pixtral": Whole(
        "llava",
        PIXTRAL,
        padded,
        _SIZES,
        keys=FULL_LAST,
    ),
    "llava_next": Whole(
        "llava_next",
        CLIP,
        tiled,
        tiles((4, (20, 50)), (5, (33, 40)), (3, (20, 30)), (4, (11, 90))),
        keys={"image_grid_pinpoints": PINPOINTS},
    ),
    "llava_next_video": Whole(
        "llava_next_video",
        CLIP,
        tiled,
        tiles((4, (20, 50)), (5, (33, 40))),
        keys={"image_grid_pinpoints": PINPOINTS},
    ),
    "vipllava": Whole(
        "vipllava",
        CLIP,
        stacked,
        frames(1, 1),
        keys={"vision_feature_layer": [-2, -1, 1], "projector_layernorm_eps": 0.03},
    ),
    "llava_onevision": Whole(
        "llava_onevision",
        SIGLIP,
        tiled,
        tiles((4, (20, 50)), (5, (33, 40)), (3, (20, 30)), (4, (11, 90))),
        keys=FULL_LAST | {"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
    ),
    "aya_vision": Whole("aya_vision", SIGLIP, stacked, frames(1, 1, 1), keys=AYA_KEYS),
    "cohere2_vision": Whole(
        "cohere2_vision", SIGLIP, stacked, frames(2, 1), keys={"alignment_intermediate_size": 20}
    ),
    "paligemma": Whole(
        "paligemma",
        SIGLIP | {"projection_dim": WIDTH},
        stacked,
        frames(1, 1),
        keys={"projection_dim": WIDTH},
    ),
    "gemma3": Whole("gemma3", SIGLIP, stacked, frames(1, 1), keys={"mm_tokens_per_image": 4}),
    "mistral3": Whole("mistral3", PIXTRAL, padded, _SIZES),
    "mistral_large4": Whole(
        "mistral_large4", PIXTRAL | {"hidden_act": "silu"}, padded, _SIZES, LARGE4_TEXT
    ),
    "lighton_ocr": Whole("lighton_ocr", PIXTRAL | {"hidden_act": "silu"}, padded, _SIZES),
    "qwen2_vl": Whole("qwen2_vl", QWEN2_TOWER, with_grids, cut(*_GRIDS, values=96)),
    "qwen2_5_vl": Whole(
        "qwen2_5_vl",
        QWEN2_5_TOWER | {"window_size": 24},
        with_grids,
        cut(*_GRIDS, values=96),
    ),
    "qwen3_vl": Whole(
        "qwen3_vl",
        QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]},
        with_grids,
        cut(*_GRIDS, values=96),
    ),
    "qwen3_5": Whole("qwen3_5", QWEN3_TOWER, with_grids, cut(*_GRIDS, values=96)),
    "glm4v": Whole(
        "glm4v",
        GLM_TOWER | {"attention_bias": True},
        with_grids,
        cut(*_STILLS, values=96),
    ),
    "glm_ocr": Whole(
        "glm_ocr", WIDE_TOWER | {"rms_norm_eps": 0.04}, with_grids, cut(*_STILLS, values=96)
    ),
    "paddleocr_vl": Whole("paddleocr_vl", NORMED, in_squares, cut(*_GRIDS, values=108)),
    "kimi_k25": Whole(
        "kimi_k25",
        KIMI_TOWER,
        in_squares,
        cut((1, 4, 6), (1, 2, 8), (1, 10, 14), values=108),
        text=DEEPSEEK_TEXT,
        keys={"projection_hidden_size": 32, "projection_layer_norm_eps": 0.05},
        published=KIMI_NAMES,
    ),
    "idefics3": Whole("idefics3", NORMED, of_idefics, frames(3, 1)),
    "smolvlm": Whole("smolvlm", NORMED, of_idefics, frames(1, 2)),
    "internvl": Whole(
        "internvl",
        NORMED
        | {
            "image_size": [24, 24],
            "patch_size": [6, 6],
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
        },
        stacked,
        frames(2, 1),
    ),
    "lfm2_vl": Whole(
        "lfm2_vl",
        LFM2_TOWER,
        of_lfm2,
        cut((1, 4, 6), (1, 2, 8), (1, 4, 4), values=108),
        keys={"projector_hidden_size": 18},
    ),
    "llama4": Whole("llama4", LLAMA4_TOWER, stacked, frames(2, 1)),
    "gemma4": Whole(
        "gemma4",
        GEMMA4_TOWER | {"standardize": True},
        of_gemma4,
        cut((1, 4, 6), (1, 2, 8), (1, 4, 4), values=108),
    ),
    "gemma4-bounded": Whole(
        "gemma4",
        GEMMA4_TOWER | {"use_clipped_linears": True},
        of_gemma4,
        cut((1, 4, 6), (1, 2, 8), (1, 4, 4), values=108),
    ),
}


def write_whole(name: str, folder: Any) -> torch.nn.Module:
    return write_model(WHOLES[name], folder)


def write_model(whole: Whole, folder: Any) -> torch.nn.Module:
    config = config_of(whole)
    architectures = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model = write_drawn(architectures[type(config)], config, folder)
    if whole.published:
        rename_tensors(Path(folder) / "model.safetensors", whole.published)
    if whole.config:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | whole.config))
    return model


def rename_tensors(file: Path, names: Mapping[str, str]) -> None:
    """Store the tensors of a file with other parts of their names."""
    found = {}
    for name, tensor in load_file(file).items():
        for theirs, published in names.items():
            name = name.replace(theirs, published)  # noqa: PLW2901
        found[name] = tensor
    save_file(found, file, {"format": "pt"})


def config_of(whole: Whole) -> Any:
    keys: dict[str, Any] = {"tie_word_embeddings": False, **whole.keys}
    return AutoConfig.for_model(
        whole.kind, vision_config=dict(whole.vision), text_config={**TEXT, **whole.text}, **keys
    )


def write_drawn(kind: Any, config: Any, folder: Any) -> torch.nn.Module:
    """Store a model of a class of transformers with random weights."""
    torch.manual_seed(0)
    model: torch.nn.Module = kind(config).eval().float()
    with torch.no_grad():
        for value in (*model.parameters(), *(b for n, b in model.named_buffers() if "std_" in n)):
            value.copy_(torch.randn_like(value) * 0.3)
        for name, value in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # each product has bounds that cut
                sign = -1 if name.endswith("_min") else 1
                value.copy_(sign * (0.2 + torch.rand(())))
    model.save_pretrained(folder)
    return model


def expected_rows(
    model: torch.nn.Module, whole: Whole, pictures: list[Picture]
) -> list[torch.Tensor]:
    """The rows that transformers makes of each picture."""
    with torch.no_grad():
        asked = model if whole.kind == "llama4" else model.model
        found = asked.get_image_features(**whole.show(pictures), return_dict=True)
    rows = found.pooler_output
    if rows is None:  # of Llama 4, which projects them later
        rows = model.multi_modal_projector(found.last_hidden_state)
    counts = [len(p.pixels) for p in pictures]
    if isinstance(rows, torch.Tensor):
        is_flat = rows.dim() == 2
        rows = [rows] if is_flat else [part.flatten(0, 1) for part in rows.split(counts)]
    rows = [row.flatten(0, -2) for row in rows]
    deep = getattr(found, "deepstack_features", None)
    if deep:
        sizes = [len(row) for row in rows]
        levels = [level if isinstance(level, torch.Tensor) else torch.cat(level) for level in deep]
        wide = torch.cat((torch.cat(list(rows)), *levels), 1)
        rows = list(wide.split(sizes))
    return list(rows)
