"""DeepSeek-V3 and R1, Kimi-K2: latent attention, and after dense layers experts chosen by sigmoids
and a learned bias.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.deepseek_v2 import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import mlp, rms, stack
from quire.models.families.mixtures import deepseek_experts_of, sparse_after, with_experts
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    for key in ("n_group", "topk_group", "n_shared_experts"):
        c.integer(key)  # which others that have these experts may leave out
    attn = latent_attention(c)
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse_after(c, dense=3)))


FAMILY = Family(("DeepseekV3ForCausalLM",), _describe, RULES, drafts_after_layers=True)
