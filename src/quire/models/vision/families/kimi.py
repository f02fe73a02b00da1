"""MoonViT, the tower of Kimi-VL and Kimi K2.5: a grid of positions that is sampled, and rotations
whose pairs turn by columns and rows in turn.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import layer_rules
from quire.models.rules import rule
from quire.models.spec import Attention, Block, Mlp, Norm
from quire.models.vision.families.clip import VISION_ACTIVATIONS
from quire.models.vision.families.qwen_vl import axial_theta, join_rules, joined_cells
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import AxialRope, LearnedGrid, PatchEmbedding, VisionTower

_NORM = Norm("layer", 1e-5, bias=True)
"""The kind of all norms, whatever the config."""


def _describe(c: ConfigReader) -> VisionTower:
    dim, heads = _size(c, "hidden_size", 1152), _size(c, "num_attention_heads", 16)
    if dim % heads or dim // heads % 4:
        allowed = f"a divisor of hidden_size={dim} that leaves a multiple of 4"
        raise unsupported(c.at("num_attention_heads"), heads, allowed)
    head_dim = dim // heads
    attn = Attention(
        *(heads, heads, head_dim, head_dim**-0.5), is_causal=False, qkv_bias=True, o_bias=True
    )
    act = c.choice("hidden_act", VISION_ACTIVATIONS, "gelu_pytorch_tanh")
    feed = Mlp(_size(c, "intermediate_size", 4304), act, gated=False, bias=True)
    depth = _size(c, "num_hidden_layers", 27, maximum=4096)
    tall, wide = (_place(c, name) for name in ("height", "width"))
    if tall != wide:
        raise unsupported(c.at("init_pos_emb_width"), wide, f"init_pos_emb_height={tall}")
    for name in ("pos_emb_time", "init_pos_emb_time"):  # of films
        c.integer(name, 4)
    c.only("pos_emb_type", "divided_fixed")
    c.only("merge_type", "sd2_tpool")
    c.only("video_attn_type", "spatial_temporal")
    return VisionTower(
        dim,
        PatchEmbedding(c.integer("patch_size", 14), bias=True, is_cut=True),
        (Block(attn, feed, _NORM),) * depth,
        (depth,),
        (),
        merge=_merge(c),
        positions=LearnedGrid(tall, "bicubic", is_square=True),
        rope=AxialRope(axial_theta(c), frequencies="shared", first="column", pairs="neighbours"),
        final_norm=_NORM,
    )


def _size(c: ConfigReader, name: str, default: int, **bounds: int) -> int:
    """A size that Kimi K2.5's published files give with `vt_` before its name."""
    usual: int = c.integer(name, default, **bounds)
    found: int = c.integer(f"vt_{name}", usual, **bounds)
    return found


def _place(c: ConfigReader, axis: str) -> int:
    found: int = c.integer(f"init_pos_emb_{axis}", c.integer(f"pos_emb_{axis}", 64))
    return found


def _merge(c: ConfigReader) -> int:
    sides = c.raw("merge_kernel_size", [2, 2])
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1]:
        raise unsupported(c.at("merge_kernel_size"), sides, "two equal numbers")
    if not isinstance(sides[0], int) or sides[0] < 1:
        raise unsupported(c.at("merge_kernel_size"), sides, "two positive numbers")
    return int(sides[0])


def _connect(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    vision = c.subconfig("vision_config")
    eps = vision.number("projector_ln_eps", c.number("projection_layer_norm_eps", 1e-5))
    inner = vision.integer("mm_hidden_size", c.integer("projection_hidden_size", tower.dim))
    if inner != tower.dim:
        raise unsupported("projection_hidden_size", inner, f"the tower's {tower.dim}")
    c.ignore("media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk")
    vision.ignore("text_hidden_size")
    vision.only("mm_projector_type", "patchmerger")
    vision.only("projector_hidden_act", "gelu")
    return replace(tower, connector=joined_cells(tower, width, Norm("layer", eps, bias=True)))


MOONVIT = TowerFamily(
    ("moonvit", "kimi_k25_vision", "kimi_k25"),
    _describe,
    (
        rule("{prefix}patch_embed.proj.{leaf}", "patch.{leaf}"),
        rule("{prefix}patch_embed.pos_emb.weight", "positions.weight"),
        rule("{prefix}encoder.final_layernorm.{leaf}", "norm.{leaf}"),
        *layer_rules(
            {
                "norm0": "attn_pre",
                "norm1": "mlp_pre",
                "wqkv": "attn.q attn.k attn.v",
                "wo": "attn.o",
                "mlp.fc0": "mlp.up",
                "mlp.fc1": "mlp.down",
            },
            at="{prefix}encoder.blocks.{layer}.",
        ),
    ),
)


KIMI_VL = WholeFamily(
    ("kimi_vl",),
    _connect,
    join_rules(*(f"multi_modal_projector.{n}" for n in ("pre_norm", "linear_1", "linear_2"))),
    roots=("vision_tower.",),
)
KIMI_K25 = WholeFamily(
    ("kimi_k25",),
    _connect,
    join_rules(*(f"mm_projector.{name}" for name in ("pre_norm", "proj.0", "proj.2"))),
    roots=("vision_tower.",),
    own=("vision_tower.", "mm_projector."),
)
