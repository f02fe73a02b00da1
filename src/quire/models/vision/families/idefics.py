"""Idefics 3 and SmolVLM."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.rules import rule
from quire.models.vision.families.clip import (
    RULES,
    describe_blocks,
    grid_side,
    image_size_of,
    quick_scales,
)
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import LearnedGrid, Merge, PatchEmbedding, Project, VisionTower


def _describe_idefics3(c: ConfigReader) -> VisionTower:
    size, patch = image_size_of(c, 224), c.integer("patch_size", 32)
    c.ignore("size", "max_image_size", "use_base_siglip")  # of the processor
    blocks = describe_blocks(c, "gelu_pytorch_tanh", 1e-6)
    return VisionTower(
        c.integer("hidden_size", 1152),
        PatchEmbedding(patch, c.integer("num_channels", 3), bias=True),
        blocks,
        (len(blocks),),
        (),
        positions=LearnedGrid(grid_side(c, size, patch), "bucket"),
        final_norm=blocks[0].norm,
        **quick_scales(c, "gelu_pytorch_tanh"),
    )


def _connect_idefics3(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    merge = c.integer("scale_factor", 2)
    return replace(tower, merge=merge, connector=(Merge(), Project(width, bias=False)))


IDEFICS3_TOWER = TowerFamily(
    ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm"),
    _describe_idefics3,
    (*RULES, rule("{prefix}post_layernorm.{leaf}", "norm.{leaf}")),
)
IDEFICS3 = WholeFamily(
    ("idefics3", "smolvlm"),
    _connect_idefics3,
    (rule("{prefix}connector.modality_projection.proj.{leaf}", "connector.1.{leaf}"),),
    roots=("vision_model.",),
    own=("vision_model.", "connector."),
)
