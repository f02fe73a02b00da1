"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack, window_of
from quire.models.families.ministral3 import describe_ministral3
from quire.models.rules import Family, text_of
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, window=window_of(c, 4096))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


def _describe_part(c: ConfigReader) -> Decoder:
    """Mistral 3 has text parts of several types."""
    kinds = {"mistral": _describe, "ministral3": describe_ministral3}
    describe: Callable[[ConfigReader], Decoder] = c.choice("model_type", kinds, "mistral")
    return describe(c)


FAMILY = Family(("MistralForCausalLM",), _describe, RULES)
TEXT = text_of(
    replace(FAMILY, describe=_describe_part), "Mistral3ForConditionalGeneration", has_head=True
)
