"""PaliGemma, Gemma 3 and Gemma 4."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, layer_rules, num_layers_of
from quire.models.rules import Rule, rule
from quire.models.spec import Attention, Block, Mlp, Norm
from quire.models.vision.families.qwen_vl import axial_theta
from quire.models.vision.rules import TowerFamily, WholeFamily
from quire.models.vision.spec import (
    BOUNDS,
    AveragePool,
    AxialRope,
    LearnedAxes,
    LearnedGrid,
    NormStep,
    PatchEmbedding,
    Project,
    VisionTower,
)


def _connect_paligemma(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    vision = c.subconfig("vision_config")
    projected = c.integer("projection_dim", vision.integer("projection_dim", width))
    if projected != width:
        raise unsupported("projection_dim", projected, f"the decoder's hidden_size={width}")
    return replace(tower, connector=(Project(width),))


def _connect_gemma3(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    tokens = c.integer("mm_tokens_per_image", 256)
    assert isinstance(tower.positions, LearnedGrid), "a tower of SigLIP"
    side = round(tokens**0.5)
    if side**2 != tokens or tower.positions.side % side:
        allowed = f"the square of a divisor of {tower.positions.side} patches on a side"
        raise unsupported("mm_tokens_per_image", tokens, allowed)
    norm = Norm("rms1p", c.subconfig("vision_config").number("layer_norm_eps", 1e-6))
    steps = (AveragePool(), NormStep(norm), Project(width, bias=False))
    return replace(tower, connector=steps, merge=tower.positions.side // side)


def _describe_gemma4(c: ConfigReader) -> VisionTower:
    dim, heads = c.integer("hidden_size", 768), c.integer("num_attention_heads", 12)
    kv_heads, head_dim = c.integer("num_key_value_heads", heads), c.integer("head_dim", 64)
    norm = Norm("rms_late_cast", c.number("rms_norm_eps", 1e-6))
    attn = Attention(
        *(heads, kv_heads, head_dim, 1.0), is_causal=False, qk_norm=norm, value_norm=True
    )
    act = c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    block = Block(attn, Mlp(c.integer("intermediate_size", 3072), act), norm, post=True)
    depth = num_layers_of(c)
    patch = PatchEmbedding(
        c.integer("patch_size", 16), is_cut=True, is_kernel=False, is_centered=True
    )
    standardizes = c.flag("standardize", False)
    c.ignore("default_output_length")  # of the processor
    return VisionTower(
        dim,
        patch,
        (block,) * depth,
        (depth,),
        (AveragePool(dim**0.5, standardizes),),
        merge=c.integer("pooling_kernel_size", 3),
        positions=LearnedAxes(c.integer("position_embedding_size", 10240)),
        rope=AxialRope(axial_theta(c, 100.0), first="column", pairs="quarters"),
        is_bounded=c.flag("use_clipped_linears", False),
    )


def _connect_gemma4(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    norm = Norm("rms_bare", c.subconfig("vision_config").number("rms_norm_eps", 1e-6))
    c.ignore(*_OF_SOUNDS)  # which are not taken
    steps = (*tower.connector, NormStep(norm), Project(width, bias=False))
    return replace(tower, connector=steps)


_OF_SOUNDS = (
    *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
)


def _rules_gemma4(tower: VisionTower) -> tuple[Rule, ...]:
    names = {
        **{f"self_attn.{part}_proj.linear": f"attn.{part}" for part in "qkvo"},
        **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
        **{f"mlp.{part}_proj.linear": f"mlp.{part}" for part in ("gate", "up", "down")},
        "input_layernorm": "attn_pre",
        "post_attention_layernorm": "attn_post",
        "pre_feedforward_layernorm": "mlp_pre",
        "post_feedforward_layernorm": "mlp_post",
    }
    return (
        rule("{prefix}patch_embedder.input_proj.{leaf}", "patch.{leaf}"),
        rule("{prefix}patch_embedder.position_embedding_table", "positions.weight"),
        *layer_rules(names, at="{prefix}encoder.layers.{layer}."),
        *(
            rule(
                f"{{prefix}}encoder.layers.{{layer}}.{stored.removesuffix('.linear')}.{bound}",
                f"layers.{{layer}}.{ours}.{bound}",
                steps=("scalar",),
            )
            for stored, ours in names.items()
            if stored.endswith(".linear")
            for bound in BOUNDS
        ),
        rule("{prefix}std_bias", "connector.0.shift"),
        rule("{prefix}std_scale", "connector.0.factor"),
    )


PALIGEMMA = WholeFamily(
    ("paligemma",),
    _connect_paligemma,
    (rule("{prefix}multi_modal_projector.linear.{leaf}", "connector.0.{leaf}"),),
    attends_both_ways=lambda text: True,
)
GEMMA3 = WholeFamily(
    ("gemma3",),
    _connect_gemma3,
    (
        rule("{prefix}multi_modal_projector.mm_soft_emb_norm.weight", "connector.1.weight"),
        rule(
            "{prefix}multi_modal_projector.mm_input_projection_weight",
            "connector.2.weight",
            steps=("transpose",),
        ),
    ),
    attends_both_ways=lambda text: True,
)
GEMMA4_TOWER = TowerFamily(("gemma4_vision",), _describe_gemma4, _rules_gemma4)
GEMMA4 = WholeFamily(
    ("gemma4",),
    _connect_gemma4,
    (rule("{prefix}embed_vision.embedding_projection.{leaf}", "connector.2.{leaf}"),),
    roots=("vision_tower.",),
    own=("vision_tower.", "embed_vision."),
    attends_both_ways=lambda text: text.get("use_bidirectional_attention") == "vision",
)
