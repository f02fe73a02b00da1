"""PaddleOCR-VL: SigLIP's blocks over pictures of any size, with rotations by row and column."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.rules import rule
from quire.models.spec import Norm
from quire.models.vision.families.clip import (
    RULES,
    describe_blocks,
    grid_side,
    image_size_of,
    quick_scales,
)
from quire.models.vision.families.qwen_vl import axial_theta, join_rules, joined_cells
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import AxialRope, LearnedGrid, PatchEmbedding, VisionTower


def _describe(c: ConfigReader) -> VisionTower:
    size, patch = image_size_of(c, 384), c.integer("patch_size", 14)
    blocks = describe_blocks(c, "gelu_pytorch_tanh", 1e-6)
    return VisionTower(
        c.integer("hidden_size", 1152),
        PatchEmbedding(patch, c.integer("num_channels", 3), bias=True, is_cut=True),
        blocks,
        (len(blocks),),
        (),
        merge=c.integer("spatial_merge_size", 2),
        positions=LearnedGrid(grid_side(c, size, patch), "bilinear"),
        rope=AxialRope(axial_theta(c)),
        final_norm=blocks[0].norm,
        **quick_scales(c, "gelu_pytorch_tanh"),
    )


def _connect(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    return replace(tower, connector=joined_cells(tower, width, Norm("layer", 1e-5, bias=True)))


PADDLE_TOWER = TowerFamily(
    ("paddleocr_vl_vision", "paddleocr_vl"),
    _describe,
    (*RULES, rule("{prefix}post_layernorm.{leaf}", "norm.{leaf}")),
    ignored=(
        r"embeddings\.position_ids",
        r"embeddings\.packing_position_embedding\.weight",
        r"head\..*",
    ),
)
PADDLE = WholeFamily(
    ("paddleocr_vl",),
    _connect,
    join_rules("mlp_AR.pre_norm", "mlp_AR.linear_1", "mlp_AR.linear_2"),
    roots=("visual.vision_model.",),
    own=("visual.", "mlp_AR."),
    outer=("",),
)
