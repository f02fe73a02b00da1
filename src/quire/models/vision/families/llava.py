"""LLaVA 1.5, NeXT and OneVision, and the models that are built like them: ViP-LLaVA, Aya Vision,
Cohere 2 Vision; of LLaVA-NeXT-Video the pictures.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS
from quire.models.rules import Rule, rule
from quire.models.spec import Norm
from quire.models.vision.rules import WholeFamily
from quire.models.vision.spec import (
    ConnectorStep,
    Merge,
    NormStep,
    Project,
    TiledPicture,
    VisionTower,
)

PROJECTOR_RULES = (
    rule("{prefix}multi_modal_projector.linear_1.{leaf}", "connector.0.{leaf}"),
    rule("{prefix}multi_modal_projector.linear_2.{leaf}", "connector.1.{leaf}"),
)


def selected(c: ConfigReader, tower: VisionTower, default: int = -2) -> VisionTower:
    """The tower up to `vision_feature_layer`, or with those; negative: counted from the last."""
    found = c.raw("vision_feature_layer", default)
    layers = found if isinstance(found, list) else [found]
    depth = len(tower.blocks)
    if not layers or not all(isinstance(i, int) and -depth - 1 <= i <= depth for i in layers):
        allowed = f"a layer from {-depth - 1} to {depth}, or a list of them"
        raise unsupported("vision_feature_layer", found, allowed)
    # hidden states of transformers begin with what enters the first block, and the last is before
    # the final norm
    outputs = tuple(i if i >= 0 else depth + 1 + i for i in layers)
    return replace(tower, blocks=tower.blocks[: max(outputs)], outputs=outputs, final_norm=None)


def with_strategy(c: ConfigReader, tower: VisionTower, default: str = "default") -> VisionTower:
    """The tower with or without its class token, as `vision_feature_select_strategy` says."""
    key = "vision_feature_select_strategy"
    strategy = c.choice_of(key, "default", "full", absent=default)
    if tower.class_token is None:
        if strategy == "default":
            raise unsupported(key, strategy, "'full', since the tower has no class token")
        return tower
    return replace(tower, keeps_class=strategy == "full")


def _mlp(c: ConfigReader, width: int) -> tuple[ConnectorStep, ...]:
    bias = c.flag("multimodal_projector_bias", True)
    act = c.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    return Project(width, bias, act), Project(width, bias)


def _connect(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.ignore("image_seq_length")
    chosen = selected(c, tower)
    if tower.image_size is not None:
        chosen = with_strategy(c, chosen)
    else:  # Pixtral, whose frames have sizes of their own
        c.only("vision_feature_select_strategy", "full", "default")
    return replace(chosen, connector=_mlp(c, width))


_VIP_LAYERS = (-2, -5, -8, -11, 6)


def _connect_vip(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.ignore("image_seq_length")
    key = "vision_feature_layers"  # of published files
    layers = c.raw(key, c.raw("vision_feature_layer", list(_VIP_LAYERS)))
    chosen = selected(ConfigReader({"vision_feature_layer": layers}), tower)
    norm = Norm("layer", c.number("projector_layernorm_eps", 1e-5), bias=True)
    act = c.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    return replace(chosen, connector=(NormStep(norm), Project(width, act=act), Project(width)))


def _pinpoints(c: ConfigReader) -> tuple[tuple[int, int], ...]:
    key = "image_grid_pinpoints"
    found = c.raw(key)
    is_list = isinstance(found, list) and bool(found)
    if not is_list or not all(
        isinstance(size, list)
        and len(size) == 2
        and all(isinstance(n, int) and n > 0 for n in size)
        for size in found
    ):
        raise unsupported(key, found, "a list of [height, width]")
    return tuple((height, width) for height, width in found)


def _connect_next(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.only("use_image_newline_parameter", True)
    connected = _connect(c, tower, width)
    return replace(_without_class(connected), tiles=TiledPicture(_checked(c, tower)))


def _connect_video(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.ignore("spatial_pool_mode", "spatial_pool_stride", "video_seq_length")  # of films
    return _connect_next(c, tower, width)


def _connect_onevision(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    ratio = c.raw("vision_aspect_ratio", "anyres_max_9")
    most = str(ratio).removeprefix("anyres_max_")
    if not str(ratio).startswith("anyres_max_") or not most.isdecimal() or int(most) < 1:
        raise unsupported("vision_aspect_ratio", ratio, "'anyres_max_' and a number of tiles")
    chosen = with_strategy(c, selected(c, tower, -1), "full")
    connected = replace(chosen, connector=_mlp(c, width))
    tiles = TiledPicture(_checked(c, tower), most_tiles=int(most))
    return replace(_without_class(connected), tiles=tiles)


def _without_class(tower: VisionTower) -> VisionTower:
    if tower.keeps_class:
        allowed = "'default', since the rows of tiles form a grid"
        raise unsupported("vision_feature_select_strategy", "full", allowed)
    return tower


def _checked(c: ConfigReader, tower: VisionTower) -> tuple[tuple[int, int], ...]:
    """The sizes of which one is chosen; each is whole tiles."""
    sizes, tile = _pinpoints(c), tower.image_size
    if tile is None or any(n % side for size in sizes for n, side in zip(size, tile, strict=True)):
        raise unsupported("image_grid_pinpoints", sizes, f"multiples of the frames' size {tile}")
    return sizes


def _shuffled(c: ConfigReader, tower: VisionTower) -> VisionTower:
    """The tower with cells of `downsample_factor` rows and columns."""
    side = c.integer("downsample_factor", 2)
    return replace(tower, merge=side)


def _swiglu(c: ConfigReader, inner: int, width: int) -> tuple[ConnectorStep, ...]:
    if inner % 2:
        raise unsupported("alignment_intermediate_size", inner, "an even number")
    return Project(inner // 2, act="silu", gated=True), Project(width)


def _connect_aya(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    chosen = with_strategy(c, _shuffled(c, selected(c, tower, -1)), "full")
    norm = Norm("layer", c.number("adapter_layer_norm_eps", 1e-6), bias=True)
    inner = c.integer("alignment_intermediate_size", width)
    return replace(chosen, connector=(Merge(), NormStep(norm), *_swiglu(c, inner, width)))


def _connect_cohere(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    inner = c.integer("alignment_intermediate_size", 36864)
    return replace(_shuffled(c, tower), connector=(Merge(), *_swiglu(c, inner, width)))


def _swiglu_rules(first: int) -> tuple[Rule, ...]:
    at = "{prefix}multi_modal_projector."
    return (
        rule(
            at + "linear_1.{leaf}",
            # the second half of the tensor is the gate
            f"connector.{first}.up.{{leaf}}",
            f"connector.{first}.gate.{{leaf}}",
            steps=("split",),
        ),
        rule(at + "linear_2.{leaf}", f"connector.{first + 1}.{{leaf}}"),
    )


LLAVA = WholeFamily(("llava",), _connect, PROJECTOR_RULES)
_NEWLINE = (*PROJECTOR_RULES, rule("{prefix}image_newline", "newline"))
LLAVA_NEXT = WholeFamily(
    ("llava_next",),
    _connect_next,
    _NEWLINE,
    own=("vision_tower.", "multi_modal_projector.", "image_newline"),
)
LLAVA_NEXT_VIDEO = replace(LLAVA_NEXT, kinds=("llava_next_video",), connect=_connect_video)
VIP_LLAVA = WholeFamily(
    ("vipllava",),
    _connect_vip,
    (
        rule("{prefix}multi_modal_projector.projector_layernorm.{leaf}", "connector.0.{leaf}"),
        rule("{prefix}multi_modal_projector.linear_1.{leaf}", "connector.1.{leaf}"),
        rule("{prefix}multi_modal_projector.linear_2.{leaf}", "connector.2.{leaf}"),
    ),
)
LLAVA_ONEVISION = replace(LLAVA_NEXT, kinds=("llava_onevision",), connect=_connect_onevision)
AYA = WholeFamily(
    ("aya_vision",),
    _connect_aya,
    (
        rule("{prefix}multi_modal_projector.layernorm.{leaf}", "connector.1.{leaf}"),
        *_swiglu_rules(2),
    ),
)
COHERE2 = WholeFamily(("cohere2_vision",), _connect_cohere, _swiglu_rules(1))
