"""Youtu-LLM: latent attention with a dense feed-forward part in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.latent_attention import LATENT_RULES, latent_attention
from quire.models.families.llama import (
    EMBEDDING_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    mlp,
    rms,
    stack,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("mlp_bias", False)  # which transformers does not read
    attn = latent_attention(
        c,
        interleaved=c.flag("rope_interleave", True),
        q_rank=1536,
        rank=512,
        unrotated=128,
        rotated=64,
        value_dim=128,
    )
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)), tie=c.flag("tie_word_embeddings", True))


RULES = EMBEDDING_RULES + LATENT_RULES + MLP_RULES + PRE_NORM_RULES
FAMILY = Family(("YoutuForCausalLM",), _describe, RULES)
