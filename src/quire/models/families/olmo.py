"""OLMo: layer norms without parameters, bounded queries, keys and values."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, clip=c.bound("clip_qkv", None), **biases(c))
    return stack(c, Block(attn, mlp(c), Norm("none", 1e-5)))


FAMILY = Family(("OlmoForCausalLM",), _describe, RULES)
