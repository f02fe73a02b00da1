"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack, window_of
from quire.models.rules import Family, text_of
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, window=window_of(c, 4096))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


def _describe_part(c: ConfigReader) -> Decoder:
    """Mistral 3 has text parts of several types."""
    c.only("model_type", "mistral")
    return _describe(c)


FAMILY = Family(("MistralForCausalLM",), _describe, RULES)
TEXT = text_of(
    replace(FAMILY, describe=_describe_part), "Mistral3ForConditionalGeneration", has_head=True
)
