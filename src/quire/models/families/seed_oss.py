"""Seed-OSS: Llama with a bias on q, k and v and a switch of its own for that of the output."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(
        c,
        usual_dim=128,
        qkv_bias=c.flag("attention_bias", True),
        o_bias=c.flag("attention_out_bias", False),
    )
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-6)))


FAMILY = Family(("SeedOssForCausalLM",), _describe, RULES)
