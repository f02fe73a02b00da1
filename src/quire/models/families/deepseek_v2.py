"""DeepSeek-V2 and V2-Lite: latent attention, and after dense layers experts of which some are
shared by all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.latent_attention import LATENT_RULES, latent_attention
from quire.models.families.llama import mlp, rms, stack
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    experts_of,
    shared_expert,
    sparse_after,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Moe

RULES = LATENT_RULES + DEEPSEEK_RULES


def _describe(c: ConfigReader) -> Decoder:
    c.only("mlp_bias", False)
    attn = latent_attention(c, interleaved=True)
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    return stack(c, with_experts(dense, _experts(c), sparse_after(c)))


def _experts(c: ConfigReader) -> Moe:
    c.only("scoring_func", "softmax")
    # transformers has the key and does not read it, while the published code divides by the sum
    c.only("norm_topk_prob", False)
    c.only("moe_layer_freq", 1)
    width = c.integer("moe_intermediate_size")
    moe = experts_of(
        c,
        "n_routed_experts",
        renorm=False,
        scale=c.number("routed_scaling_factor", 1.0),
        wide_router=True,
        shared=shared_expert(c, width * c.integer("n_shared_experts")),
    )
    return replace(moe, **_groups(c, moe))


def _groups(c: ConfigReader, moe: Moe) -> dict[str, Any]:
    """Of which only the best take part, where `topk_method` says so."""
    is_limited = c.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    if not is_limited:
        # files with plain choice keep both keys, without a meaning
        c.integer("n_group", None)
        c.integer("topk_group", None)
        return {}
    groups = c.integer("n_group")
    if moe.experts % groups:
        raise unsupported("n_group", groups, f"a divisor of {moe.experts} experts")
    top_groups = c.integer("topk_group", maximum=groups)
    if top_groups * (moe.experts // groups) < moe.top_k:
        allowed = f"groups that have {moe.top_k} experts together"
        raise unsupported("topk_group", top_groups, allowed)
    return {"groups": groups, "top_groups": top_groups, "group_best": 1}


FAMILY = Family(("DeepseekV2ForCausalLM",), _describe, RULES)
