"""Granite 4: Mamba-2 in most layers, attention in the others, Granite's multipliers; with experts
or without.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.granite import multipliers_of
from quire.models.families.granite_moe import EXPERT_RULES
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    num_layers_of,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mamba import MAMBA2_NAMES, mixer_rules
from quire.models.families.mamba2 import mamba2_of_hybrid
from quire.models.families.mixtures import experts_of, shared_expert
from quire.models.positions import Rope
from quire.models.rope_config import read_rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Mlp, Moe

_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""Layer types as old and new files call them."""


def _describe(c: ConfigReader) -> Decoder:
    c.only("normalization_function", "rmsnorm")
    norm = rms(c, 1e-6)
    attn = attention(c, rope=_rope(c), scale=c.number("attention_multiplier", 1.0), **biases(c))
    scale = c.number("residual_multiplier", 1.0)
    attending = Block(attn, _feed_forward(c), norm, residual_scale=scale)
    recurrent = replace(attending, mixer=mamba2_of_hybrid(c, norm_eps=norm.eps))
    blocks = [recurrent if kind == "mamba" else attending for kind in _layer_types(c)]
    return stack(c, blocks, **multipliers_of(c))


def _feed_forward(c: ConfigReader) -> Mlp | Moe:
    shared = shared_expert(c, c.integer("shared_intermediate_size", 1024))
    # read below although unused, since the reader refuses keys that nobody asked for
    if "num_local_experts" not in c or c.raw("num_local_experts", None) == 0:
        c.raw("num_local_experts", None)
        c.raw("num_experts_per_tok", None)
        c.raw("intermediate_size", None)  # of experts
        return shared
    width = c.integer("intermediate_size")
    return experts_of(c, "num_local_experts", width=width, score="softmax_topk", shared=shared)


def _rope(c: ConfigReader) -> Rope | None:
    is_rotated = c.raw("position_embedding_type", "nope") == "rope"
    c.only("position_embedding_type", "nope", "rope")
    # read in any case: models without positions keep the keys of a rotation in their files
    rope = read_rope(c, head_dim_of(c), context=context_of(c))
    return rope if is_rotated else None


def _layer_types(c: ConfigReader) -> list[str]:
    depth = num_layers_of(c)
    older = c.raw("layers_block_type", ["mamba"] * depth)
    return [_KINDS[kind] for kind in read_kinds(c, "layer_types", _KINDS, older)]


FAMILY = Family(
    ("GraniteMoeHybridForCausalLM",),
    _describe,
    (
        *mixer_rules("mamba", MAMBA2_NAMES),
        *EXPERT_RULES,
        *layer_rules(
            {
                "shared_mlp.input_linear": "mlp.gate mlp.up",
                "shared_mlp.output_linear": "mlp.down",
            }
        ),
        *RULES,
    ),
    scales_given=True,
)
