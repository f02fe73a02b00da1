"""A.X K1: DeepSeek-V3 with a norm after the feed-forward parts that have experts."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.deepseek_v2 import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import mlp, norm_rules, rms, stack
from quire.models.families.mixtures import (
    deepseek_experts_of,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Moe


def _describe(c: ConfigReader) -> Decoder:
    for key in ("n_group", "topk_group"):
        c.integer(key)  # which others that have these experts may leave out
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    dense = Block(latent_attention(c), mlp(c), rms(c, 1e-6))
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    blocks = with_experts(dense, deepseek_experts_of(c), sparse)
    return stack(c, [replace(b, mlp_post=isinstance(b.mlp, Moe)) for b in blocks])


FAMILY = Family(
    ("AXK1ForCausalLM",),
    _describe,
    RULES + norm_rules(mlp_post="post_mlp_layernorm"),
    drafts_after_layers=True,
)
