"""Phi-3.5-MoE: layer norms and biases around Mixtral's experts, which SparseMixer chooses.

Contexts beyond the original length take LongRoPE's long divisors with their own factor, as the
model was trained; transformers changes only the factor.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, attention, biases, stack, window_of
from quire.models.families.mixtures import expert_rules, experts_of, router_rule
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm

_AT = "block_sparse_moe."
_RULES = (router_rule(_AT + "gate"), *expert_rules(_AT + "experts", ("w1", "w3", "w2")), *RULES)


def _describe(c: ConfigReader) -> Decoder:
    original = c.integer("original_max_position_embeddings", None)
    scalings = {"kinds": ("default", "longrope"), "original": original}
    attn = attention(c, theta=1e6, rope_facts=scalings, window=window_of(c), **biases(c))
    c.raw("input_jitter_noise", None)  # in training
    moe = experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="sparsemixer",
        renorm=False,
        jitter=c.number("router_jitter_noise", 0.01),
    )
    if moe.top_k != 2:
        raise unsupported("num_experts_per_tok", moe.top_k, "2, as SparseMixer chooses")
    norm = Norm("layer", c.number("rms_norm_eps", 1e-5), bias=True)
    return stack(c, Block(attn, moe, norm), head_bias=c.flag("lm_head_bias", False))


FAMILY = Family(("PhimoeForCausalLM", "PhiMoEForCausalLM"), _describe, _RULES)
