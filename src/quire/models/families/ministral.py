"""Ministral: Mistral with windows in the layers that the config says."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, sliding_blocks, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    window = window_of(c, 4096)
    block = Block(attention(c), mlp(c), rms(c, 1e-6))
    return stack(c, sliding_blocks(c, block, lambda _: window is not None, window))


FAMILY = Family(("MinistralForCausalLM",), _describe, RULES)
