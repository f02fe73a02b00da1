"""Helium: Llama with neighbours rotated."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, context_of, head_dim_of, mlp, rms, stack
from quire.models.rope_config import read_rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    dim = head_dim_of(c, 128)
    rope = read_rope(c, dim, theta=1e5, context=context_of(c), interleaved=True)
    attn = attention(c, head_dim=dim, rope=rope, qkv_bias=c.flag("attention_bias", False))
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-8)))


FAMILY = Family(("HeliumForCausalLM",), _describe, RULES)
