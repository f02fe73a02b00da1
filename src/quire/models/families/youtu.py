"""Youtu-LLM: latent attention with a dense feed-forward part in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.latent_attention import LATENT_RULES, latent_attention
from quire.models.families.llama import mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("mlp_bias", False)  # which transformers does not read
    attn = latent_attention(c)
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)), tie=c.flag("tie_word_embeddings", True))


FAMILY = Family(("YoutuForCausalLM",), _describe, LATENT_RULES)
