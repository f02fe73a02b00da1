"""Hunyuan V3: Qwen3's attention, experts chosen by sigmoids and a bias, a shared expert."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack
from quire.models.families.mixtures import (
    expert_rules,
    experts_of,
    router_rule,
    select_bias_rule,
    shared_expert,
    shared_rules,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Moe

_RULES = (
    router_rule("mlp.router.gate"),
    select_bias_rule("mlp.expert_bias"),
    *expert_rules("mlp.experts"),
    *shared_rules("mlp.shared_mlp"),
)


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-5)
    c.only("qk_norm", True)
    c.only("mlp_bias", False)
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    attn = attention(c, usual_dim=128, theta=11_158_840.0, qk_norm=norm, **biases(c))
    dense = Block(attn, mlp(c), norm)
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(dense, _experts(c), sparse))


def _experts(c: ConfigReader) -> Moe:
    c.only("route_norm", True)
    c.only("moe_router_use_sigmoid", True)
    c.only("moe_router_enable_expert_bias", True)
    c.raw("enable_moe_fp32_combine", None)  # one rounding of a sum of two rounded numbers
    width = c.integer("moe_intermediate_size")
    num_shared = c.integer("num_shared_experts", 1)
    return experts_of(
        c,
        "num_experts",
        score="sigmoid",
        scale=c.number("router_scaling_factor", 2.826),
        select_bias=True,
        wide_router=True,
        shared=shared_expert(c, width * num_shared),
    )


FAMILY = Family(("HYV3ForCausalLM",), _describe, RULES + _RULES, drafts_after_layers=True)
