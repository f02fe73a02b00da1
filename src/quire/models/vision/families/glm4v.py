"""GLM-4V: the tower of Qwen-VL's kind, whose cells are joined by a convolution."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.rules import rule
from quire.models.spec import Block, Norm
from quire.models.vision.families.clip import (
    grid_side,
    image_size_of,
    vision_attention,
    vision_mlp,
)
from quire.models.vision.families.qwen_vl import GATED_BLOCKS, PATCH_RULE, axial_theta, cut_patches
from quire.models.vision.rules import TowerFamily
from quire.models.vision.spec import (
    AxialRope,
    LearnedGrid,
    Merge,
    NormStep,
    Project,
    VisionTower,
)


def _describe_glm(c: ConfigReader) -> VisionTower:
    size = image_size_of(c, 336)
    patch, dim = cut_patches(c, 14, bias=True), c.integer("hidden_size", 1536)
    eps = c.number("rms_norm_eps", 1e-5)
    norm = Norm("rms", eps)
    has_bias = c.flag("attention_bias", False)
    attn = vision_attention(c, "num_heads", qkv_bias=has_bias, o_bias=False)
    out = c.integer("out_hidden_size", 4096)
    feed = vision_mlp(c, "silu", gated=True, bias=False)
    block = Block(attn, replace(feed, width=out), norm)
    merge, depth = c.integer("spatial_merge_size", 2), c.integer("depth", 24, maximum=4096)
    inner = c.integer("intermediate_size", 13696)
    steps = (
        Merge(),
        Project(out, cells=merge**2, is_kernel=True),
        Project(out, bias=False),
        NormStep(Norm("layer", 1e-5, bias=True), "gelu"),
        Project(inner, bias=False, act=feed.act, gated=True),
        Project(out, bias=False),
    )
    return VisionTower(
        dim,
        patch,
        (block,) * depth,
        (depth,),
        steps,
        merge=merge,
        positions=LearnedGrid(grid_side(c, size, patch.size), "bicubic"),
        rope=AxialRope(axial_theta(c)),
        embed_norm=norm,
        norm_before_positions=True,
        final_norm=norm,
    )


GLM = TowerFamily(
    ("glm4v_vision", "glm4v", "glm4v_moe_vision", "glm4v_moe"),
    _describe_glm,
    (
        PATCH_RULE,
        *GATED_BLOCKS,
        rule("{prefix}embeddings.position_embedding.weight", "positions.weight"),
        rule("{prefix}post_conv_layernorm.{leaf}", "embed_norm.{leaf}"),
        rule("{prefix}post_layernorm.{leaf}", "norm.{leaf}"),
        rule("{prefix}downsample.{leaf}", "connector.1.{leaf}"),
        rule("{prefix}merger.proj.{leaf}", "connector.2.{leaf}"),
        rule("{prefix}merger.post_projection_norm.{leaf}", "connector.3.{leaf}"),
        rule("{prefix}merger.gate_proj.{leaf}", "connector.4.gate.{leaf}"),
        rule("{prefix}merger.up_proj.{leaf}", "connector.4.up.{leaf}"),
        rule("{prefix}merger.down_proj.{leaf}", "connector.5.{leaf}"),
    ),
    ignored=(r"embeddings\.position_ids",),
)
