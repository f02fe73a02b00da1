"""Towers of CLIP, SigLIP, SigLIP 2 and Idefics 3, and SmolVLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.clip import QUICK_SCALES
from quire.models.families.llama import ACTIVATIONS, layer_rules, num_layers_of
from quire.models.rules import rule
from quire.models.spec import Attention, Block, Mlp, Norm
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    ClassPool,
    LearnedGrid,
    Merge,
    PatchEmbedding,
    ProbePool,
    Project,
    VisionTower,
)

VISION_ACTIVATIONS = {**ACTIVATIONS, "quick_gelu": "silu"}
"""`quick_scales` are of this last one."""

LAYER_RULES = layer_rules(
    {
        **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
        "self_attn.out_proj": "attn.o",
        "layer_norm1": "attn_pre",
        "layer_norm2": "mlp_pre",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    },
    at="{prefix}encoder.layers.{layer}.",
)
RULES = (
    rule("{prefix}embeddings.patch_embedding.{leaf}", "patch.{leaf}"),
    rule("{prefix}embeddings.position_embedding.weight", "positions.weight"),
    *LAYER_RULES,
)


def image_size_of(c: ConfigReader, default: Any = None) -> tuple[int, int]:
    """Height and width of the frames, as multiples of a patch."""
    size = c.raw("image_size", default)
    sides = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise unsupported(c.at("image_size"), size, "a positive integer or two of them")
    return sides[0], sides[1]


def grid_side(c: ConfigReader, size: tuple[int, int], patch: int) -> int:
    """Rows and columns of patches in a square frame."""
    if size[0] != size[1] or size[0] < patch:
        raise unsupported(c.at("image_size"), list(size), "a square of at least one patch")
    return size[0] // patch


def vision_attention(
    c: ConfigReader, heads: str = "num_attention_heads", **facts: Any
) -> Attention:
    """Attention over frames; the hidden width is shared out over the heads."""
    width, count = c.integer("hidden_size"), c.integer(heads)
    if width % count:
        raise unsupported(c.at(heads), count, f"a divisor of hidden_size={width}")
    dim = width // count
    given = {"scale": dim**-0.5, "is_causal": False, "qkv_bias": True, "o_bias": True, **facts}
    return Attention(count, count, dim, **given)


def vision_mlp(c: ConfigReader, act: str, **facts: Any) -> Mlp:
    """A feed-forward part, not gated unless `facts` say so."""
    found = c.choice("hidden_act", VISION_ACTIVATIONS, act)
    return Mlp(c.integer("intermediate_size"), found, **{"gated": False, "bias": True, **facts})


def quick_scales(c: ConfigReader, act: str, key: str = "hidden_act") -> dict[str, Any]:
    """The factors of leaves where the activation is the quick form of gelu."""
    is_quick = c.raw(key, act) == "quick_gelu"
    return {"leaf_scales": QUICK_SCALES} if is_quick else {}


def describe_blocks(c: ConfigReader, act: str, eps: float) -> tuple[Block, ...]:
    """The blocks that CLIP and SigLIP have in common."""
    norm = Norm("layer", c.number("layer_norm_eps", eps), bias=True)
    block = Block(vision_attention(c), vision_mlp(c, act), norm)
    return (block,) * num_layers_of(c)


_OF_PAIRS = ("projection_dim", "initializer_factor", "vision_use_head")
"""Keys of training, and of what compares a picture with a text."""


def _describe_clip(c: ConfigReader) -> VisionTower:
    c.ignore(*_OF_PAIRS, "vocab_size")
    size, patch = image_size_of(c, 224), c.integer("patch_size", 32)
    blocks = describe_blocks(c, "quick_gelu", 1e-5)
    return VisionTower(
        c.integer("hidden_size", 768),
        PatchEmbedding(patch, c.integer("num_channels", 3)),
        blocks,
        (len(blocks),),
        (),
        image_size=size,
        positions=LearnedGrid(grid_side(c, size, patch)),
        class_token="first",
        embed_norm=blocks[0].norm,
        **quick_scales(c, "quick_gelu"),
    )


def _describe_siglip(c: ConfigReader) -> VisionTower:
    c.ignore(*_OF_PAIRS)
    size, patch = image_size_of(c, 224), c.integer("patch_size", 16)
    blocks = describe_blocks(c, "gelu_pytorch_tanh", 1e-6)
    return VisionTower(
        c.integer("hidden_size", 768),
        PatchEmbedding(patch, c.integer("num_channels", 3), bias=True),
        blocks,
        (len(blocks),),
        (),
        image_size=size,
        positions=LearnedGrid(grid_side(c, size, patch)),
        final_norm=blocks[0].norm,
        **quick_scales(c, "gelu_pytorch_tanh"),
    )


def _describe_siglip2(c: ConfigReader) -> VisionTower:
    c.ignore(*_OF_PAIRS)
    count = c.integer("num_patches", 256)
    side = round(count**0.5)
    if side**2 != count:
        raise unsupported(c.at("num_patches"), count, "a square number")
    blocks = describe_blocks(c, "gelu_pytorch_tanh", 1e-6)
    patch = c.integer("patch_size", 16)
    return VisionTower(
        c.integer("hidden_size", 768),
        PatchEmbedding(
            *(patch, c.integer("num_channels", 3)), bias=True, is_cut=True, is_kernel=False
        ),
        blocks,
        (len(blocks),),
        (),
        positions=LearnedGrid(side, "bilinear_antialias"),
        final_norm=blocks[0].norm,
        **quick_scales(c, "gelu_pytorch_tanh"),
    )


CLIP = TowerFamily(
    ("clip_vision_model",),
    _describe_clip,
    (
        *RULES,
        rule("{prefix}embeddings.class_embedding", "class_token"),
        # CLIP's own spelling
        rule("{prefix}pre_layrnorm.{leaf}", "embed_norm.{leaf}"),
    ),
    # the norm of the class token's result, which no connector reads
    ignored=(r"embeddings\.position_ids", r"post_layernorm\.(weight|bias)"),
)
_NORM = rule("{prefix}post_layernorm.{leaf}", "norm.{leaf}")
SIGLIP = TowerFamily(
    ("siglip_vision_model",),
    _describe_siglip,
    (*RULES, _NORM),
    # the head pools to one vector, which no decoder reads
    ignored=(r"embeddings\.position_ids", r"head\..*"),
)
SIGLIP2 = TowerFamily(
    ("siglip2_vision_model",), _describe_siglip2, (*RULES, _NORM), ignored=(r"head\..*",)
)


def _project(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    """The class token's vector, as wide as those of texts."""
    c.ignore("logit_scale_init_value", "initializer_factor")
    return replace(
        tower,
        final_norm=tower.embed_norm,
        pool=ClassPool(),
        connector=(Project(c.integer("projection_dim", 512), bias=False),),
    )


def _probe(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    """Pooling by a learned vector's attention to the patches."""
    c.ignore("initializer_factor")
    if c.subconfig("vision_config").raw("vision_use_head", True) is False:
        raise unsupported(
            "vision_config.vision_use_head", False, "true, as pictures have no vector"
        )
    attention, mlp, norm = tower.blocks[0].mixer, tower.blocks[0].mlp, tower.final_norm
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp) and norm is not None
    return replace(tower, pool=ProbePool(attention.heads, norm, mlp))


_HEAD = "{prefix}vision_model.head."
CLIP_MODEL = WholeFamily(
    ("clip",),
    _project,
    (
        rule("{prefix}vision_model.post_layernorm.{leaf}", "norm.{leaf}"),
        rule("{prefix}visual_projection.{leaf}", "connector.0.{leaf}"),
    ),
    roots=("vision_model.",),
    own=("vision_model.", "visual_projection."),
    outer=("",),
)
SIGLIP_MODEL = WholeFamily(
    ("siglip", "siglip2"),
    _probe,
    (
        rule(f"{_HEAD}probe", "pool.probe"),
        *(
            rule(
                f"{_HEAD}attention.in_proj_{leaf}",
                *(f"pool.{part}.{leaf}" for part in "qkv"),
                steps=("split",),
            )
            for leaf in ("weight", "bias")
        ),
        rule(f"{_HEAD}attention.out_proj.{{leaf}}", "pool.o.{leaf}"),
        rule(f"{_HEAD}layernorm.{{leaf}}", "pool.norm.{leaf}"),
        rule(f"{_HEAD}mlp.fc1.{{leaf}}", "pool.mlp.up.{leaf}"),
        rule(f"{_HEAD}mlp.fc2.{{leaf}}", "pool.mlp.down.{leaf}"),
    ),
    roots=("vision_model.",),
    own=("vision_model.",),
    outer=("",),
)


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
