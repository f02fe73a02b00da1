"""Flint: Qwen3-MoE with attention sinks, windows and rotations in most layers, and experts that
sigmoids choose next to a shared one.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    mlp,
    num_layers_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    shared_expert,
    shared_rules,
    sparse_by_step,
    with_experts,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.supply(mlp_only_layers=[0, 1])
    norm, depth = rms(c, 1e-6, "rms_late_cast"), num_layers_of(c)
    attn = attention(c, usual_dim=128, qk_norm=norm, sinks=True, **biases(c))
    ropes = {"sliding_attention": attn.rope, "full_attention": None}

    def slides(layer: int) -> bool:
        return layer > 1 and layer % 4 != 1 and layer < depth - 1

    blocks = sliding_blocks(c, Block(attn, mlp(c), norm), slides, window_of(c, 513), ropes)
    moe = experts_of(
        c,
        "num_experts",
        score="sigmoid",
        renorm=c.flag("norm_topk_prob", True),
        wide_router=True,
        shared=shared_expert(c, c.integer("shared_expert_intermediate_size", 1024)),
    )
    return stack(c, with_experts(blocks, moe, sparse_by_step(c)))


FAMILY = Family(
    ("FlintForCausalLM",),
    _describe,
    (
        rule(LAYER + "self_attn.softmax_offset", "layers.{layer}.attn.sinks"),
        *shared_rules("mlp.shared_expert"),
        *QWEN_RULES,
        *RULES,
    ),
)
