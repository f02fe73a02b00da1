"""Granite: Llama with multipliers on embedding, scores, residuals and logits."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    bias = c.flag("attention_bias", False)
    scale = c.number("attention_multiplier", 1.0)
    attn = attention(c, scale=scale, qkv_bias=bias, o_bias=bias)
    block = Block(
        attn,
        mlp(c, bias=c.flag("mlp_bias", False)),
        rms(c, 1e-6),
        residual_scale=c.number("residual_multiplier", 1.0),
    )
    return stack(
        c,
        block,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=1 / c.number("logits_scaling", 1.0),
    )


FAMILY = Family(("GraniteForCausalLM",), _describe, RULES)
