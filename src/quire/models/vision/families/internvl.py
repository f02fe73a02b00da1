"""InternVL, as transformers and as the published code (`internvl_chat`) have it, and LFM2-VL."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, layer_rules, num_layers_of
from quire.models.rules import Rule, rule
from quire.models.spec import Activation, Block, Norm
from quire.models.vision.families.clip import grid_side, image_size_of, vision_attention, vision_mlp
from quire.models.vision.families.llava import selected, with_strategy
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    LearnedGrid,
    Merge,
    NormStep,
    PatchEmbedding,
    Project,
    VisionTower,
)


def _describe_intern(c: ConfigReader) -> VisionTower:
    size, patches = image_size_of(c, [448, 448]), c.raw("patch_size", [14, 14])
    sides = set(patches) if isinstance(patches, list) else {patches}
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise unsupported(c.at("patch_size"), patches, "squares")
    [patch] = sides
    c.ignore("hidden_dropout_prob", "projection_dropout", "layer_scale_init_value")
    c.ignore("use_mask_token", "use_mean_pooling")
    c.only("use_absolute_position_embeddings", True)
    kind = c.choice_of("norm_type", "layer_norm", "rms_norm", absent="layer_norm")
    eps = c.number("layer_norm_eps", 1e-6)
    norm = Norm("layer", eps, bias=True) if kind == "layer_norm" else Norm("rms", eps)
    # transformers leaves the default of this norm, whatever layer_norm_eps is
    qk_norm = Norm("rms", 1e-6) if c.flag("use_qk_norm", False) else None
    attn = vision_attention(
        c, qkv_bias=c.flag("attention_bias", False), qk_norm=qk_norm, qk_norm_over="full"
    )
    depth = num_layers_of(c)
    return VisionTower(
        c.integer("hidden_size", 1024),
        PatchEmbedding(patch, c.integer("num_channels", 3), bias=True),
        (Block(attn, vision_mlp(c, "gelu"), norm),) * depth,
        (depth,),
        (),
        image_size=size,
        positions=LearnedGrid(grid_side(c, size, patch), "bicubic"),
        class_token="first",
        # transformers has no norm after the blocks where the pooling is by the mean
        final_norm=None if c.flag("use_mean_pooling", True) else Norm("layer", eps, bias=True),
        layer_scale=True,
    )


def _connect_intern(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.ignore("image_seq_length")
    chosen = tower if c.raw("vision_feature_layer", -1) == -1 else selected(c, tower, -1)
    chosen = with_strategy(c, chosen)
    return _merged(c, chosen, width, c.choice("projector_hidden_act", ACTIVATIONS, "gelu"))


def _merged(c: ConfigReader, tower: VisionTower, width: int, act: Activation) -> VisionTower:
    """The tower with patches merged as `downsample_ratio` says, and a projector of two layers."""
    ratio = c.number("downsample_ratio", 0.5)
    merge = round(1 / ratio)
    if merge * ratio != 1.0 or tower.keeps_class:
        raise unsupported("downsample_ratio", ratio, "one by a whole number, without class tokens")
    # torch's default for epsilon, which no key changes
    norm = NormStep(Norm("layer", 1e-5, bias=True))
    steps = (Merge(), norm, Project(width, act=act), Project(width))
    return replace(tower, merge=merge, connector=steps)


INTERN_TOWER = TowerFamily(
    ("internvl_vision",),
    _describe_intern,
    (
        rule("{prefix}embeddings.patch_embeddings.projection.{leaf}", "patch.{leaf}"),
        rule("{prefix}embeddings.cls_token", "class_token", steps=("row", "row")),
        rule("{prefix}embeddings.position_embeddings", "positions.weight", steps=("row",)),
        *layer_rules(
            {
                **{f"attention.{part}_proj": f"attn.{part}" for part in "qkv"},
                **{f"attention.{part}_norm": f"attn.{part}_norm" for part in "qk"},
                "attention.projection_layer": "attn.o",
                "layernorm_before": "attn_pre",
                "layernorm_after": "mlp_pre",
                "mlp.fc1": "mlp.up",
                "mlp.fc2": "mlp.down",
            },
            at="{prefix}encoder.layer.{layer}.",
        ),
        rule("{prefix}encoder.layer.{layer}.lambda_1", "layers.{layer}.attn_scale"),
        rule("{prefix}encoder.layer.{layer}.lambda_2", "layers.{layer}.mlp_scale"),
        rule("{prefix}layernorm.{leaf}", "norm.{leaf}"),
    ),
    ignored=(r"embeddings\.mask_token",),
)
AT = "{prefix}multi_modal_projector."
NORMED_PROJECTOR = (
    rule(AT + "layer_norm.{leaf}", "connector.1.{leaf}"),
    rule(AT + "linear_1.{leaf}", "connector.2.{leaf}"),
    rule(AT + "linear_2.{leaf}", "connector.3.{leaf}"),
)
INTERN = WholeFamily(("internvl",), _connect_intern, NORMED_PROJECTOR, roots=("vision_tower.",))


def _describe_published(c: ConfigReader) -> VisionTower:
    size, patch = image_size_of(c, 448), c.integer("patch_size", 14)
    c.ignore(*_NOT_COMPUTED)
    kind = c.choice_of("norm_type", "layer_norm", "rms_norm", absent="layer_norm")
    eps = c.number("layer_norm_eps", 1e-6)
    norm = Norm("layer", eps, bias=True) if kind == "layer_norm" else Norm("rms", eps)
    qk_norm = Norm("rms", eps) if c.flag("qk_normalization", False) else None
    bias = c.flag("qkv_bias", False)
    attn = vision_attention(c, qkv_bias=bias, qk_norm=qk_norm, qk_norm_over="full")
    depth = num_layers_of(c)
    return VisionTower(
        c.integer("hidden_size", 1024),
        PatchEmbedding(patch, c.integer("num_channels", 3), bias=True),
        (Block(attn, vision_mlp(c, "gelu"), norm),) * depth,
        (depth,),
        (),
        image_size=size,
        positions=LearnedGrid(grid_side(c, size, patch), "bicubic"),
        class_token="first",
        layer_scale=True,
    )


def _connect_published(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.only("select_layer", -1)
    # v1 joined patches with rows and columns exchanged
    c.only("ps_version", "v2")
    c.ignore(*_OF_PICTURES)
    return _merged(c, tower, width, "gelu")


_NOT_COMPUTED = ("use_flash_attn", "drop_path_rate", "dropout", "initializer_factor")
_OF_PICTURES = (
    *("template", "pad2square", "dynamic_image_size", "use_thumbnail", "force_image_size"),
    *("min_dynamic_patch", "max_dynamic_patch", "num_image_token", "system_message"),
    *("use_backbone_lora", "use_llm_lora", "hidden_size", "output_attentions"),
)
"""Keys of how pictures are cut, which quire.media.internvl_chat reads, and of training."""
PUBLISHED_TOWER = TowerFamily(
    ("intern_vit_6b",),
    _describe_published,
    (
        rule("{prefix}embeddings.patch_embedding.{leaf}", "patch.{leaf}"),
        rule("{prefix}embeddings.class_embedding", "class_token", steps=("row", "row")),
        rule("{prefix}embeddings.position_embedding", "positions.weight", steps=("row",)),
        *layer_rules(
            {
                "attn.qkv": "attn.q attn.k attn.v",
                **{f"attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
                "attn.proj": "attn.o",
                "norm1": "attn_pre",
                "norm2": "mlp_pre",
                "mlp.fc1": "mlp.up",
                "mlp.fc2": "mlp.down",
            },
            at="{prefix}encoder.layers.{layer}.",
        ),
        rule("{prefix}encoder.layers.{layer}.ls1", "layers.{layer}.attn_scale"),
        rule("{prefix}encoder.layers.{layer}.ls2", "layers.{layer}.mlp_scale"),
    ),
)
PUBLISHED = WholeFamily(
    ("internvl_chat",),
    _connect_published,
    (
        rule("{prefix}mlp1.0.{leaf}", "connector.1.{leaf}"),
        rule("{prefix}mlp1.1.{leaf}", "connector.2.{leaf}"),
        rule("{prefix}mlp1.3.{leaf}", "connector.3.{leaf}"),
    ),
    roots=("vision_model.",),
    own=("vision_model.", "mlp1."),
    outer=("",),
)


def _connect_lfm2(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.only("vision_feature_layer", -1)
    merge = c.integer("downsample_factor", 2)
    bias = c.flag("projector_bias", True)
    act = c.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    inner = c.integer("projector_hidden_size", 2560)
    norm = (
        (NormStep(Norm("layer", 1e-5, bias=True)),)
        if c.flag("projector_use_layernorm", True)
        else ()
    )
    steps = (Merge(), *norm, Project(inner, bias, act), Project(width, bias))
    return replace(tower, merge=merge, connector=steps)


def _rules_lfm2(tower: VisionTower) -> tuple[Rule, ...]:
    if any(isinstance(step, NormStep) for step in tower.connector):
        return NORMED_PROJECTOR
    return (
        rule(AT + "linear_1.{leaf}", "connector.1.{leaf}"),
        rule(AT + "linear_2.{leaf}", "connector.2.{leaf}"),
    )


LFM2 = WholeFamily(("lfm2_vl",), _connect_lfm2, _rules_lfm2)
