"""Mistral 4: DeepSeek's attention with queries that grow by position, experts chosen by softmax."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.deepseek import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import mlp, rms, stack
from quire.models.families.mistral import temperature_of
from quire.models.families.mixtures import (
    experts_of,
    groups_of,
    shared_expert,
    sparse_after,
    stacked_expert_rules,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.rename(n_routed_experts="num_local_experts")
    temperature = temperature_of(c)
    c.only("head_dim", c.integer("qk_nope_head_dim", 64) + c.integer("qk_rope_head_dim", 64))
    attn = latent_attention(
        c, head_dim_key=None, has_share=True, q_rank=1024, rank=256, unrotated=64, rotated=64
    )
    width, num_shared = c.integer("moe_intermediate_size"), c.integer("n_shared_experts", 1)
    groups, top_groups = groups_of(c, c.integer("n_routed_experts"))
    moe = experts_of(
        c,
        "n_routed_experts",
        renorm=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        shared=shared_expert(c, width * num_shared),
    )
    if moe.top_k > moe.experts // groups * top_groups:
        raise unsupported("num_experts_per_tok", moe.top_k, "at most the experts of these groups")
    dense = Block(replace(attn, temperature=temperature), mlp(c), rms(c, 1e-6))
    return stack(c, with_experts(dense, moe, sparse_after(c, dense=0)))


FAMILY = Family(("Mistral4ForCausalLM",), _describe, (*stacked_expert_rules("mlp.experts"), *RULES))
