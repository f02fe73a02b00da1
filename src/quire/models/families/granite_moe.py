"""Granite with experts: Granite's multipliers, a softmax over the chosen logits, a shared expert in
some forms, and Granite SWA's windows and sinks in one.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.granite import SINKS, block_of, describe_swa, multipliers_of
from quire.models.families.llama import RULES, stack
from quire.models.families.mixtures import (
    experts_of,
    router_rule,
    shared_expert,
    stacked_expert_rules,
)
from quire.models.rules import Family, rule
from quire.models.spec import Decoder, Moe

_STORED, _OURS = "{prefix}layers.{layer}.", "layers.{layer}.mlp."
_INPUTS = ("gate", "up")
EXPERT_RULES = (
    router_rule("block_sparse_moe.router.layer"),
    rule(
        _STORED + "block_sparse_moe.input_linear.weight",
        *(f"{_OURS}experts.{{expert}}.{part}.weight" for part in _INPUTS),
        steps=("stacked", "split"),
    ),
    rule(
        _STORED + "block_sparse_moe.output_linear.weight",
        _OURS + "experts.{expert}.down.weight",
        steps=("stacked",),
    ),
    rule(
        _STORED + "shared_mlp.input_linear.weight",
        *(f"{_OURS}shared.{part}.weight" for part in _INPUTS),
        steps=("split",),
    ),
    rule(_STORED + "shared_mlp.output_linear.weight", _OURS + "shared.down.weight"),
)


def _moe(c: ConfigReader) -> Moe:
    shared = c.integer("shared_intermediate_size", 0, minimum=0)
    return experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="softmax_topk",
        shared=shared_expert(c, shared) if shared else None,
    )


def _describe(c: ConfigReader) -> Decoder:
    return stack(c, block_of(c, _moe(c), 1e-6), **multipliers_of(c))


PLAIN = Family(
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _describe,
    RULES + EXPERT_RULES,
    scales_given=True,
)
SWA = Family(
    ("GraniteMoeSWAForCausalLM",),
    lambda c: describe_swa(c, _moe(c)),
    (
        router_rule("block_sparse_moe.router"),
        *stacked_expert_rules("block_sparse_moe.experts"),
        *EXPERT_RULES,
        *RULES,
        SINKS,
    ),
    scales_given=True,
)
