"""Pixtral's tower, and Mistral 3, Mistral Large 4 and LightOnOCR around it."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, layer_rules, num_layers_of
from quire.models.rules import Rule, rule
from quire.models.spec import Attention, Block, Norm
from quire.models.vision.families.clip import vision_mlp
from quire.models.vision.families.llava import selected
from quire.models.vision.families.qwen_vl import axial_theta
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    AxialRope,
    Merge,
    NormStep,
    PatchEmbedding,
    Project,
    VisionTower,
)

_NORM = Norm("rms", 1e-5)
"""The kind of all norms, whatever the config."""


def _describe(c: ConfigReader) -> VisionTower:
    c.ignore("image_size")  # the longest side that pictures are made for
    dim, heads = c.integer("hidden_size", 1024), c.integer("num_attention_heads", 16)
    head_dim = c.integer("head_dim", dim // heads)
    if head_dim * heads != dim or head_dim % 4:
        allowed = f"hidden_size={dim} shared out over the heads, and a multiple of 4"
        raise unsupported(c.at("head_dim"), head_dim, allowed)
    attn = Attention(heads, heads, head_dim, head_dim**-0.5, is_causal=False)
    feed = vision_mlp(c, "gelu", gated=True, bias=False)
    depth = num_layers_of(c)
    return VisionTower(
        dim,
        PatchEmbedding(c.integer("patch_size", 16), c.integer("num_channels", 3)),
        (Block(attn, feed, _NORM),) * depth,
        (depth,),
        (),
        rope=AxialRope(axial_theta(c), frequencies="dealt"),
        embed_norm=_NORM,
    )


PIXTRAL = TowerFamily(
    ("pixtral",),
    _describe,
    (
        rule("{prefix}patch_conv.{leaf}", "patch.{leaf}"),
        rule("{prefix}ln_pre.{leaf}", "embed_norm.{leaf}"),
        *layer_rules(
            {
                **{f"attention.{part}_proj": f"attn.{part}" for part in "qkvo"},
                **{f"feed_forward.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
                "attention_norm": "attn_pre",
                "ffn_norm": "mlp_pre",
            },
            at="{prefix}transformer.layers.{layer}.",
        ),
    ),
)


def _describe_published(c: ConfigReader) -> VisionTower:
    tower = _describe(c)
    assert isinstance(tower.rope, AxialRope)
    return replace(tower, rope=replace(tower.rope, pairs="neighbours"))


PUBLISHED = TowerFamily(
    PIXTRAL.kinds,
    _describe_published,
    (
        rule("{prefix}patch_conv.{leaf}", "patch.{leaf}"),
        rule("{prefix}ln_pre.{leaf}", "embed_norm.{leaf}"),
        *layer_rules(
            {
                **{f"attention.w{part}": f"attn.{part}" for part in "qkvo"},
                **{
                    f"feed_forward.w{i}": f"mlp.{p}"
                    for i, p in ((1, "gate"), (2, "down"), (3, "up"))
                },
                "attention_norm": "attn_pre",
                "ffn_norm": "mlp_pre",
            },
            at="{prefix}transformer.layers.{layer}.",
        ),
    ),
)
"""The family in Mistral's own files, which rotate neighbours; transformers reorders rows."""


def _connect(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    chosen = selected(c, tower, -1)
    bias = c.flag("multimodal_projector_bias", False)
    act = c.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    if len(chosen.outputs) > 1:
        listed = list(chosen.outputs)
        raise unsupported("vision_feature_layer", listed, "one layer, since cells are as wide")
    return _merged(c, chosen, Project(width, bias, act), Project(width, bias))


def _connect_lighton(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    return _merged(c, tower, Project(width, bias=False, act="gelu"), Project(width, bias=False))


def _merged(c: ConfigReader, tower: VisionTower, *products: Project) -> VisionTower:
    """The tower with cells that become one patch's row before the products."""
    merge = c.integer("spatial_merge_size", 2)
    norm = Norm("rms", c.subconfig("text_config").number("rms_norm_eps", 1e-6))
    joined = Project(tower.dim, bias=False, cells=merge**2)
    return replace(tower, connector=(NormStep(norm), Merge(), joined, *products), merge=merge)


def _rules(at: str) -> tuple[Rule, ...]:
    return (
        rule(at + "norm.{leaf}", "connector.0.{leaf}"),
        rule(at + "patch_merger.merging_layer.{leaf}", "connector.2.{leaf}"),
        rule(at + "linear_1.{leaf}", "connector.3.{leaf}"),
        rule(at + "linear_2.{leaf}", "connector.4.{leaf}"),
    )


MISTRAL3 = WholeFamily(
    ("mistral3",),
    _connect,
    _rules("{prefix}multi_modal_projector."),
    roots=("vision_tower.",),
)
MISTRAL_LARGE4 = WholeFamily(
    ("mistral_large4",),
    _connect,
    (
        rule("pre_mm_projector_norm.{leaf}", "connector.0.{leaf}"),
        rule("patch_merger.merging_layer.{leaf}", "connector.2.{leaf}"),
        rule("vision_language_adapter.w_in.{leaf}", "connector.3.{leaf}"),
        rule("vision_language_adapter.w_out.{leaf}", "connector.4.{leaf}"),
    ),
    roots=("vision_encoder.",),
    own=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
    outer=("",),
    towers=dict.fromkeys(PUBLISHED.kinds, PUBLISHED),
)
LIGHTON_OCR = WholeFamily(
    ("lighton_ocr",),
    _connect_lighton,
    _rules("{prefix}vision_projection."),
    roots=("vision_encoder.",),
    own=("vision_encoder.", "vision_projection."),
)
