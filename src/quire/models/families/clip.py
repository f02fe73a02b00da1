"""Text towers of CLIP and SigLIP: learned positions, norms before the parts, and a projection of
the last token; tokens of CLIP see those before them, and those of SigLIP the whole prompt.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import pooling_family, whole_attention
from quire.models.families.llama import ACTIVATIONS, context_of, layer_norm, layer_rules, stack
from quire.models.pooling.spec import HeadLayer, PoolerSpec
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp

_RULES = (
    rule("{prefix}embeddings.token_embedding.weight", "embed.weight"),
    rule("{prefix}embeddings.position_embedding.weight", "positions.weight"),
    rule("{prefix}final_layer_norm.{leaf}", "norm.{leaf}"),
    *layer_rules(
        {
            **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "self_attn.out_proj": "attn.o",
            "layer_norm1": "attn_pre",
            "layer_norm2": "mlp_pre",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        at="{prefix}encoder.layers.{layer}.",
    ),
)
_QUICK = 1.702
"""The activation x * sigmoid(1.702 x) is silu(1.702 x) / 1.702."""
QUICK_SCALES = (
    ("mlp.up.weight", _QUICK),
    ("mlp.up.bias", _QUICK),
    ("mlp.down.weight", 1 / _QUICK),
)
"""Factors of leaves, by the ends of their names, that make silu that activation."""
_OF_PAIRS = ("logit_scale_init_value", "initializer_factor", "projection_dim", "projection_size")
"""Keys of how a text is compared with a picture, of training, and of projections."""
_TOWERS = (r"embeddings\.position_ids", r"vision_model\..*", r"visual_projection\..*")
_LOGITS = (r"logit_(scale|bias)",)


def _describe(c: ConfigReader, act: str, eps: float, is_causal: bool) -> Decoder:
    c.ignore(*_OF_PAIRS)
    is_quick = c.raw("hidden_act", act) == "quick_gelu"
    acts = {**ACTIVATIONS, "quick_gelu": "silu"}
    feed = Mlp(
        c.integer("intermediate_size"), c.choice("hidden_act", acts, act), gated=False, bias=True
    )
    attn = whole_attention(c, qkv_bias=True, o_bias=True)
    norm = layer_norm(c, eps=c.number("layer_norm_eps", eps))
    return stack(
        c,
        Block(replace(attn, is_causal=is_causal), feed, norm),
        learned_positions=context_of(c),
        leaf_scales=QUICK_SCALES if is_quick else (),
        tie=False,
    )


def _describe_clip(c: ConfigReader) -> Decoder:
    return _describe(c, "quick_gelu", 1e-5, is_causal=True)


def _describe_siglip(c: ConfigReader) -> Decoder:
    c.supply(max_position_embeddings=64)
    return _describe(c, "gelu_pytorch_tanh", 1e-6, is_causal=False)


def _as_it_is(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("embed", "token_embed"), pooling="last")


def _projected(c: ConfigReader) -> PoolerSpec:
    layer = HeadLayer(c.integer("projection_dim", 512), "identity", bias=False)
    return replace(_as_it_is(c), dense=(layer,))


def _headed(c: ConfigReader) -> PoolerSpec:
    width = c.integer("projection_size", c.integer("hidden_size"))
    return replace(_as_it_is(c), dense=(HeadLayer(width, "identity"),))


_CLIP = Family((), _describe_clip, _RULES, prefix="text_model.", ignored=(*_TOWERS, *_LOGITS))
CLIP = (
    pooling_family(
        replace(_CLIP, ignored=(*_CLIP.ignored, r"text_projection\..*")),
        ("CLIPTextModel",),
        _as_it_is,
        (),
    ),
    pooling_family(
        _CLIP,
        ("CLIPModel", "CLIPTextModelWithProjection"),
        _projected,
        (rule("text_projection.{leaf}", "pooler.dense.0.{leaf}"),),
    ),
)
SIGLIP = pooling_family(
    replace(_CLIP, describe=_describe_siglip),
    ("SiglipModel", "SiglipTextModel", "Siglip2Model", "Siglip2TextModel"),
    _headed,
    (rule("{prefix}head.{leaf}", "pooler.dense.0.{leaf}"),),
)
