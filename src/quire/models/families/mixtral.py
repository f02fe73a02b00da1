"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    ACTIVATIONS,
    RULES,
    attention,
    num_experts_of,
    rms,
    stack,
    window_of,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Moe

_STORED, _OURS = "{prefix}layers.{layer}.block_sparse_moe.", "layers.{layer}.mlp."
_RULES = (
    rule(_STORED + "gate.weight", _OURS + "router.weight"),
    *(
        rule(
            f"{_STORED}experts.{{expert}}.{stored}.weight",
            f"{_OURS}experts.{{expert}}.{ours}.weight",
        )
        for stored, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, theta=1e6, window=window_of(c))
    experts = num_experts_of(c, "num_local_experts")
    moe = Moe(
        experts=experts,
        top_k=c.integer("num_experts_per_tok", maximum=experts),
        width=c.integer("intermediate_size"),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    return stack(c, Block(attn, moe, rms(c, 1e-5)))


FAMILY = Family(("MixtralForCausalLM",), _describe, _RULES)
