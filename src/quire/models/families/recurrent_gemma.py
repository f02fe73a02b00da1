"""RecurrentGemma (Griffin): gated linear recurrences, and attention within a window in every third
layer.
"""

from __future__ import annotations

import math
import struct

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    attention,
    layer_rules,
    mlp,
    num_layers_of,
    rms,
    stack,
    top_rules,
)
from quire.models.mixers.recurrent.spec import GatedLinear
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mixer

_CONTEXT = 8192
"""Positions of the published models, whose configs do not say it."""
_KINDS = ("recurrent", "attention")


def _describe(c: ConfigReader) -> Decoder:
    c.supply(max_position_embeddings=_CONTEXT)
    c.ignore("w_init_variance_scale", "final_w_init_variance_scale")
    dim, depth = c.integer("hidden_size"), num_layers_of(c)
    norm = rms(c, 1e-6, "rms1p")
    # the key counts gate and up together
    width = c.integer("intermediate_size", minimum=2) // 2
    feed = mlp(c, width=width, act_key="hidden_activation", act="gelu_pytorch_tanh", bias=True)
    attn = attention(
        c,
        partial=0.5,
        window=c.integer("attention_window_size", 2048),
        qkv_bias=c.flag("attention_bias", False),
        o_bias=True,
    )
    channels = c.integer("lru_width", dim)
    if channels % attn.heads:
        raise unsupported("lru_width", channels, f"a multiple of {attn.heads} heads")
    recurrence = GatedLinear(
        channels, attn.heads, c.integer("conv1d_width", 4, minimum=2), act=feed.act
    )
    types = c.raw("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(types, list) or not types or set(types) - set(_KINDS):
        raise unsupported("block_types", types, "a list of recurrent and attention")
    mixers: dict[str, Mixer] = {"recurrent": recurrence, "attention": attn}
    blocks = [Block(mixers[types[i % len(types)]], feed, norm) for i in range(depth)]
    return stack(
        c,
        blocks,
        embed_scale=_bfloat16(math.sqrt(dim)),
        logit_softcap=c.number("logits_soft_cap", 30.0),
        tie=c.flag("tie_word_embeddings", True),
    )


def _bfloat16(value: float) -> float:
    """The nearest number of that type, as which the models have the embedding's scale."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)


_AT, _OURS = LAYER + "temporal_block.rg_lru.", "layers.{layer}.mixer."
FAMILY = Family(
    ("RecurrentGemmaForCausalLM",),
    _describe,
    (
        *top_rules("embed_tokens", "final_norm"),
        *layer_rules(
            {
                "temporal_pre_norm": "attn_pre",
                "channel_pre_norm": "mlp_pre",
                "temporal_block.linear_x": "mixer.x",
                "temporal_block.linear_y": "mixer.y",
                "temporal_block.linear_out": "mixer.out",
                "temporal_block.conv_1d": "mixer.conv",
                **{f"temporal_block.{part}_proj": f"attn.{part}" for part in "qkvo"},
                **{f"mlp_block.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
            }
        ),
        rule(_AT + "recurrent_param", _OURS + "rate"),
        rule(_AT + "input_gate_weight", _OURS + "enter.weight"),
        rule(_AT + "input_gate_bias", _OURS + "enter.bias"),
        rule(_AT + "recurrent_gate_weight", _OURS + "keep.weight"),
        rule(_AT + "recurrent_gate_bias", _OURS + "keep.bias"),
    ),
    scales_given=True,
)
