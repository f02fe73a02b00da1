"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, window=window_of(c, 4096))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


FAMILY = Family(("MistralForCausalLM",), _describe, RULES)
