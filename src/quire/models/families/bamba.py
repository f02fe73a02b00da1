"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in the others."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    layer_rules,
    mlp,
    num_layers_of,
    rms,
    stack,
)
from quire.models.families.mamba import MAMBA2_NAMES, mixer_rules
from quire.models.families.mamba2 import mamba2_of_hybrid
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.ignore("z_loss_coefficient")
    norm = rms(c, 1e-5)
    attn = attention(c, partial=0.5, **biases(c))
    attending = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), norm)
    recurrent = replace(attending, mixer=mamba2_of_hybrid(c, norm_eps=norm.eps))
    depth, layers = num_layers_of(c), _attending(c)
    return stack(c, [attending if i in layers else recurrent for i in range(depth)])


def _attending(c: ConfigReader) -> list[int]:
    layers = c.raw("attn_layer_indices", [])
    c.ignore("layer_types", "layers_block_type")  # derived from it
    if not isinstance(layers, list) or not all(i in range(num_layers_of(c)) for i in layers):
        raise unsupported("attn_layer_indices", layers, "a list of layer numbers")
    return layers


FAMILY = Family(
    ("BambaForCausalLM",),
    _describe,
    (
        *mixer_rules("mamba", MAMBA2_NAMES),
        *layer_rules(
            {
                "pre_ff_layernorm": "mlp_pre",
                **{f"feed_forward.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
            }
        ),
        rule("{prefix}final_layernorm.weight", "norm.weight"),
        *RULES,
    ),
)
