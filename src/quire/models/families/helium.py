"""Helium: Llama with neighbours rotated."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    bias = c.flag("attention_bias", False)
    attn = attention(c, usual_dim=128, theta=1e5, interleaved=True, qkv_bias=bias)
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-8)))


FAMILY = Family(("HeliumForCausalLM",), _describe, RULES)
