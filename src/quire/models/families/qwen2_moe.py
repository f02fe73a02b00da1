"""Qwen2 mixture of experts: Qwen2's attention, experts in the layers that the config says, and a
shared expert with a gate.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, sliding_blocks, stack, window_of
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

_GATE_RULE = rule(
    "{prefix}layers.{layer}.mlp.shared_expert_gate.weight",
    "layers.{layer}.mlp.shared_gate.weight",
)


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, qkv_bias=c.flag("qkv_bias", True))
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    moe = experts_of(
        c,
        "num_experts",
        renorm=c.flag("norm_topk_prob", False),
        shared=shared_expert(c, c.integer("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    return stack(c, with_experts(_windows(c, dense), moe, sparse_by_step(c)))


def _windows(c: ConfigReader, block: Block) -> list[Block]:
    """The block for each layer type; without `layer_types` every other layer below
    `max_window_layers` has a window, if `use_sliding_window`.
    """
    c.only("use_mrope", False)
    window, below = window_of(c, 4096), c.integer("max_window_layers", 28, minimum=0)
    window = window if c.flag("use_sliding_window", False) else None
    slides = range(0, 0 if window is None else below, 2)
    return sliding_blocks(c, block, lambda layer: layer in slides, window)


FAMILY = Family(
    ("Qwen2MoeForCausalLM",),
    _describe,
    RULES + QWEN_RULES + shared_rules("mlp.shared_expert") + (_GATE_RULE,),
)
