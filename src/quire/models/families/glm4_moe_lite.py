"""GLM-4.7-Flash: DeepSeek-V3's attention and experts in other sizes."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.deepseek_v2 import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import mlp, rms, stack
from quire.models.families.mixtures import (
    deepseek_experts_of,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    attn = latent_attention(c, q_rank=768, unrotated=192, value_dim=256)
    dense = Block(attn, mlp(c), rms(c, 1e-5))
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse))


FAMILY = Family(("Glm4MoeLiteForCausalLM",), _describe, RULES, drafts_after_layers=True)
