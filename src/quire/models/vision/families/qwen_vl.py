"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: frames of any size, rotations by row and column, and
the products that join cells as part of the tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import layer_rules
from quire.models.rules import Rule, rule
from quire.models.spec import Attention, Block, Mlp, Norm
from quire.models.vision.families.clip import (
    VISION_ACTIVATIONS,
    quick_scales,
    vision_attention,
    vision_mlp,
)
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    AxialRope,
    ConnectorStep,
    LearnedGrid,
    Merge,
    NormStep,
    PatchEmbedding,
    Project,
    VisionTower,
)

_EPS = 1e-6
"""Epsilon of all norms, whatever the config."""


def axial_theta(c: ConfigReader, default: float = 1e4) -> float:
    """The base of rotations by row and column."""
    theta: float = c.number("rope_theta", default)
    rope = c.section("rope_parameters")
    if rope is not None:
        rope.only("rope_type", "axial", "default")
        theta = rope.number("rope_theta", theta)
    return theta


def cut_patches(c: ConfigReader, size: int, **facts: Any) -> PatchEmbedding:
    """The patches of pictures that come cut, in the order of cells."""
    return PatchEmbedding(
        *(c.integer("patch_size", size), c.integer("in_channels", 3)),
        c.integer("temporal_patch_size", 2),
        is_cut=True,
        in_cells=True,
        **facts,
    )


def _tower(c: ConfigReader, dim: int, block: Block, patch: PatchEmbedding) -> VisionTower:
    depth = c.integer("depth", maximum=4096)
    return VisionTower(
        dim,
        patch,
        (block,) * depth,
        (depth,),
        (),
        merge=c.integer("spatial_merge_size", 2),
        rope=AxialRope(axial_theta(c)),
    )


def joined_cells(tower: VisionTower, width: int, norm: Norm) -> tuple[ConnectorStep, ...]:
    """Each patch normed, the cell's as one row, and two products."""
    inner = tower.dim * tower.merge**2
    return NormStep(norm), Merge(), Project(inner, act="gelu"), Project(width)


def join_rules(norm: str, first: str, second: str) -> tuple[Rule, ...]:
    """The names of the norm and of the products of `joined_cells`, as the tower's connector."""
    places = {norm: 0, first: 2, second: 3}
    return tuple(
        rule(f"{{prefix}}{name}.{{leaf}}", f"connector.{place}.{{leaf}}")
        for name, place in places.items()
    )


def _describe_2(c: ConfigReader) -> VisionTower:
    dim = c.integer("embed_dim", 1280)
    width = c.number("mlp_ratio", 4) * dim
    norm = Norm("layer", _EPS, bias=True)
    act = c.choice("hidden_act", VISION_ACTIVATIONS, "quick_gelu")
    feed = Mlp(int(width), act, gated=False, bias=True)
    heads = c.integer("num_heads", 16)
    if dim % heads:
        raise unsupported(c.at("num_heads"), heads, f"a divisor of embed_dim={dim}")
    head_dim = dim // heads
    attn = Attention(
        *(heads, heads, head_dim, head_dim**-0.5), is_causal=False, qkv_bias=True, o_bias=True
    )
    tower = _tower(c, dim, Block(attn, feed, norm), cut_patches(c, 14))
    tower = replace(tower, **quick_scales(c, "quick_gelu"))
    return replace(tower, connector=joined_cells(tower, c.integer("hidden_size", 3584), norm))


def _describe_2_5(c: ConfigReader) -> VisionTower:
    norm = Norm("rms", _EPS)
    feed = vision_mlp(c, "silu", gated=True)
    patch, dim = cut_patches(c, 14), c.integer("hidden_size", 3584)
    tower = _tower(c, dim, Block(vision_attention(c, "num_heads"), feed, norm), patch)
    c.ignore("tokens_per_second")  # of positions in the decoder
    window = c.integer("window_size", 112)
    cells = window // tower.merge // patch.size
    if cells < 1:
        raise unsupported(c.at("window_size"), window, "at least one cell of patches")
    whole = c.raw("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or not all(isinstance(i, int) for i in whole):
        raise unsupported(c.at("fullatt_block_indexes"), whole, "a list of layers")
    return replace(
        tower,
        connector=joined_cells(tower, c.integer("out_hidden_size", 3584), norm),
        window=cells,
        whole_blocks=tuple(sorted(whole)),
    )


def _describe_3(c: ConfigReader) -> VisionTower:
    norm = Norm("layer", _EPS, bias=True)
    patch, dim = cut_patches(c, 16, bias=True), c.integer("hidden_size", 1152)
    feed = vision_mlp(c, "gelu_pytorch_tanh")
    tower = _tower(c, dim, Block(vision_attention(c, "num_heads"), feed, norm), patch)
    places = c.integer("num_position_embeddings", 2304)
    if round(places**0.5) ** 2 != places:
        raise unsupported(c.at("num_position_embeddings"), places, "a square number")
    layers = c.raw("deepstack_visual_indexes", [])
    if not isinstance(layers, list) or not all(
        isinstance(i, int) and 0 <= i < len(tower.blocks) for i in layers
    ):
        raise unsupported(c.at("deepstack_visual_indexes"), layers, "a list of layers")
    width = c.integer("out_hidden_size", 3584)
    normed, merge, *products = joined_cells(tower, width, norm)
    return replace(
        tower,
        positions=LearnedGrid(round(places**0.5), "bilinear_corners"),
        connector=(normed, merge, *products),
        # these norm whole cells, and the last connector each patch
        deepstack=tuple((layer, (merge, normed, *products)) for layer in layers),
    )


def _block_rules(names: dict[str, str]) -> tuple[Rule, ...]:
    shared = {
        "attn.qkv": "attn.q attn.k attn.v",
        "attn.proj": "attn.o",
        "norm1": "attn_pre",
        "norm2": "mlp_pre",
    }
    return layer_rules({**shared, **names}, at="{prefix}blocks.{layer}.")


PATCH_RULE = rule("{prefix}patch_embed.proj.{leaf}", "patch.{leaf}")
_JOIN_RULES = join_rules("merger.ln_q", "merger.mlp.0", "merger.mlp.2")
GATED_BLOCKS = _block_rules({f"mlp.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")})


def _rules_3(tower: VisionTower) -> tuple[Rule, ...]:
    found = [
        PATCH_RULE,
        rule("{prefix}pos_embed.weight", "positions.weight"),
        *_block_rules({"mlp.linear_fc1": "mlp.up", "mlp.linear_fc2": "mlp.down"}),
        *join_rules("merger.norm", "merger.linear_fc1", "merger.linear_fc2"),
    ]
    for i in range(len(tower.deepstack)):
        at, ours = f"{{prefix}}deepstack_merger_list.{i}.", f"deepstack.{i}."
        found += [
            rule(at + "norm.{leaf}", ours + "1.{leaf}"),
            rule(at + "linear_fc1.{leaf}", ours + "2.{leaf}"),
            rule(at + "linear_fc2.{leaf}", ours + "3.{leaf}"),
        ]
    return tuple(found)


QWEN2 = TowerFamily(
    ("qwen2_vl_vision", "qwen2_vl"),
    _describe_2,
    (PATCH_RULE, *_block_rules({"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}), *_JOIN_RULES),
)
QWEN2_5 = TowerFamily(
    ("qwen2_5_vl_vision", "qwen2_5_vl"),
    _describe_2_5,
    (PATCH_RULE, *GATED_BLOCKS, *_JOIN_RULES),
)
QWEN3 = TowerFamily(
    (
        *("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe"),
        *("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe"),
    ),
    _describe_3,
    _rules_3,
)


def _connect(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    last = tower.connector[-1]
    if isinstance(last, Project) and last.width != width:
        allowed = f"the decoder's hidden_size={width}"
        raise unsupported("vision_config.out_hidden_size", last.width, allowed)
    return tower


WHOLE = WholeFamily(
    (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        *("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
    ),
    _connect,
    (),
    roots=("visual.",),
    own=("visual.",),
    outer=("model.", ""),
)
