"""Aria, text: Llama with experts next to shared ones, stored as one tensor of all."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import LAYER, RULES, attention, biases, rms, stack
from quire.models.families.mixtures import experts_of, router_rule, shared_expert, shared_rules
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

_EXPERTS = "layers.{layer}.mlp.experts.{expert}."


def _describe(c: ConfigReader) -> Decoder:
    c.only("mlp_bias", False)
    c.only("hidden_act", "silu")
    width = c.integer("intermediate_size", 4096)
    c.only("moe_intermediate_size", width)
    moe = experts_of(
        c,
        "moe_num_experts",
        "moe_topk",
        width=width,
        score="softmax_topk",
        shared=shared_expert(c, width * c.integer("moe_num_shared_experts", 2)),
    )
    return stack(c, Block(attention(c, **biases(c)), moe, rms(c, 1e-6)))


FAMILY = Family(
    ("AriaTextForCausalLM",),
    _describe,
    (
        rule(
            LAYER + "mlp.experts.fc1.weight",
            _EXPERTS + "gate.weight",
            _EXPERTS + "up.weight",
            steps=("transpose", "stacked", "split"),
        ),
        rule(
            LAYER + "mlp.experts.fc2.weight",
            _EXPERTS + "down.weight",
            steps=("transpose", "stacked"),
        ),
        router_rule("mlp.router"),
        *shared_rules("mlp.shared_experts"),
        *RULES,
    ),
)
