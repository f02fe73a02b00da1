"""Llama 4."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import layer_rules, num_layers_of
from quire.models.rules import rule
from quire.models.spec import Block, Mlp, Norm
from quire.models.vision.families.clip import grid_side, image_size_of, vision_attention
from quire.models.vision.families.qwen_vl import axial_theta
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    AxialRope,
    LearnedGrid,
    Merge,
    PatchEmbedding,
    Project,
    VisionTower,
)


def _describe_llama4(c: ConfigReader) -> VisionTower:
    size, patch = image_size_of(c, 448), c.integer("patch_size", 14)
    norm = Norm("layer", c.number("norm_eps", 1e-5), bias=True)
    if norm.eps != 1e-5:
        raise unsupported(c.at("norm_eps"), norm.eps, "1e-05, as the reference computes it")
    feed = Mlp(c.integer("intermediate_size", 5632), "gelu", gated=False, bias=True)
    c.only("hidden_act", "gelu")
    c.ignore("projector_dropout", "num_channels", "multi_modal_projector_bias")
    ratio = c.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio)
    if merge * ratio != 1.0:
        raise unsupported(c.at("pixel_shuffle_ratio"), ratio, "one by a whole number")
    depth, dim = num_layers_of(c), c.integer("hidden_size", 768)
    inner, out = c.integer("projector_input_dim", 4096), c.integer("projector_output_dim", 4096)
    if inner != out:
        allowed = f"projector_output_dim={out}, since one product follows the other"
        raise unsupported(c.at("projector_input_dim"), inner, allowed)
    c.only("vision_feature_layer", -1)
    c.only("vision_feature_select_strategy", "default")
    c.ignore("vision_output_dim")
    return VisionTower(
        dim,
        PatchEmbedding(patch, is_kernel=False),
        (Block(vision_attention(c), feed, norm),) * depth,
        (depth,),
        (Merge(), Project(inner, bias=False, act="gelu"), Project(out, bias=False, act="gelu")),
        merge=merge,
        image_size=size,
        positions=LearnedGrid(grid_side(c, size, patch)),
        # places count from 1: the class token does not rotate
        rope=AxialRope(axial_theta(c), first="column", pairs="neighbours", offset=1),
        class_token="last",
        embed_norm=norm,
        final_norm=norm,
    )


def _connect_llama4(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    return replace(tower, connector=(*tower.connector, Project(width, bias=False)))


LLAMA4_TOWER = TowerFamily(
    ("llama4_vision_model",),
    _describe_llama4,
    (
        rule("{prefix}patch_embedding.linear.{leaf}", "patch.{leaf}"),
        rule("{prefix}class_embedding", "class_token"),
        rule("{prefix}positional_embedding_vlm", "positions.weight"),
        rule("{prefix}layernorm_pre.{leaf}", "embed_norm.{leaf}"),
        rule("{prefix}layernorm_post.{leaf}", "norm.{leaf}"),
        *layer_rules(
            {
                **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkvo"},
                "input_layernorm": "attn_pre",
                "post_attention_layernorm": "mlp_pre",
                "mlp.fc1": "mlp.up",
                "mlp.fc2": "mlp.down",
            },
            at="{prefix}model.layers.{layer}.",
        ),
        rule("{prefix}vision_adapter.mlp.fc1.{leaf}", "connector.1.{leaf}"),
        rule("{prefix}vision_adapter.mlp.fc2.{leaf}", "connector.2.{leaf}"),
    ),
    ignored=(r"rotary_embedding\.freqs_ci",),
)
LLAMA4 = WholeFamily(
    ("llama4",),
    _connect_llama4,
    (rule("{prefix}multi_modal_projector.linear_1.{leaf}", "connector.3.{leaf}"),),
    roots=("vision_model.",),
    own=("vision_model.", "multi_modal_projector."),
    outer=("", "model."),
)
