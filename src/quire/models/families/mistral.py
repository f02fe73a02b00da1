"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    context_of,
    head_dim_of,
    mlp,
    rms,
    stack,
    window_of,
)
from quire.models.rope_config import read_rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    dim = head_dim_of(c)
    rope = read_rope(c, dim, context=context_of(c))
    attn = attention(c, rope, dim, window=window_of(c, 4096))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


FAMILY = Family(("MistralForCausalLM",), _describe, RULES)
