"""GLM-4V and GLM-OCR: towers of Qwen-VL's kind, whose cells are joined by a convolution."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import layer_rules
from quire.models.rules import rule
from quire.models.spec import Attention, Block, Mlp, Norm
from quire.models.vision.families.clip import grid_side, image_size_of, vision_attention, vision_mlp
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
    attn = vision_attention(c, "num_heads", qkv_bias=c.flag("attention_bias", False), o_bias=False)
    out = c.integer("out_hidden_size", 4096)
    # blocks are as wide as the result; intermediate_size is of the connector's product
    feed = replace(vision_mlp(c, "silu", gated=True, bias=False), width=out)
    tower = _tower(c, attn, feed, c.integer("intermediate_size", 13696))
    return replace(
        tower,
        positions=LearnedGrid(grid_side(c, size, tower.patch.size), "bicubic"),
        embed_norm=tower.final_norm,
        norm_before_positions=True,
    )


def _describe_ocr(c: ConfigReader) -> VisionTower:
    c.ignore("image_size")  # of a grid of positions that this tower does not have
    norm = Norm("rms", c.number("rms_norm_eps", 1e-5))
    bias = c.flag("attention_bias", True)
    attn = vision_attention(c, "num_heads", qkv_bias=bias, o_bias=bias, qk_norm=norm)
    feed = vision_mlp(c, "silu", gated=True, bias=bias)
    # the width as transformers computes it: no key has it
    inner = c.integer("out_hidden_size", 1536) * c.integer("in_channels", 3)
    return _tower(c, attn, feed, inner)


def _tower(c: ConfigReader, attn: Attention, feed: Mlp, inner: int) -> VisionTower:
    """The tower without positions that are learned; `inner` is the width of the last product."""
    patch, dim = cut_patches(c, 14, bias=True), c.integer("hidden_size", 1536)
    norm = Norm("rms", c.number("rms_norm_eps", 1e-5))
    merge, depth = c.integer("spatial_merge_size", 2), c.integer("depth", 24, maximum=4096)
    out = c.integer("out_hidden_size", 4096)
    steps = (
        Merge(),
        Project(out, cells=merge**2, is_kernel=True),
        Project(out, bias=False),
        # torch's default for epsilon, which no key changes
        NormStep(Norm("layer", 1e-5, bias=True), "gelu"),
        Project(inner, bias=False, act=feed.act, gated=True),
        Project(out, bias=False),
    )
    return VisionTower(
        dim,
        patch,
        (Block(attn, feed, norm),) * depth,
        (depth,),
        steps,
        merge=merge,
        rope=AxialRope(axial_theta(c)),
        final_norm=norm,
    )


_RULES = (
    PATCH_RULE,
    *GATED_BLOCKS,
    rule("{prefix}post_layernorm.{leaf}", "norm.{leaf}"),
    rule("{prefix}downsample.{leaf}", "connector.1.{leaf}"),
    rule("{prefix}merger.proj.{leaf}", "connector.2.{leaf}"),
    rule("{prefix}merger.post_projection_norm.{leaf}", "connector.3.{leaf}"),
    rule("{prefix}merger.gate_proj.{leaf}", "connector.4.gate.{leaf}"),
    rule("{prefix}merger.up_proj.{leaf}", "connector.4.up.{leaf}"),
    rule("{prefix}merger.down_proj.{leaf}", "connector.5.{leaf}"),
)
GLM = TowerFamily(
    ("glm4v_vision", "glm4v", "glm4v_moe_vision", "glm4v_moe"),
    _describe_glm,
    (
        *_RULES,
        rule("{prefix}embeddings.position_embedding.weight", "positions.weight"),
        rule("{prefix}post_conv_layernorm.{leaf}", "embed_norm.{leaf}"),
    ),
    ignored=(r"embeddings\.position_ids",),
)
_NORMS = {f"attn.{part}_norm": f"attn.{part}_norm" for part in "qk"}
GLM_OCR = TowerFamily(
    ("glm_ocr_vision", "glm_ocr"),
    _describe_ocr,
    (*_RULES, *layer_rules(_NORMS, at="{prefix}blocks.{layer}.")),
)
