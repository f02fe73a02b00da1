"""Solar Open: Llama's attention with DeepSeek-V3's experts in every layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, rms, stack
from quire.models.families.mixtures import DEEPSEEK_RULES, deepseek_experts_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.raw("intermediate_size", None)  # of dense layers, of which there are none
    c.only("first_k_dense_replace", 0)
    attn = attention(c, usual_dim=128, theta=1e6, qkv_bias=c.flag("attention_bias", False))
    return stack(c, Block(attn, deepseek_experts_of(c), rms(c, 1e-5)))


FAMILY = Family(("SolarOpenForCausalLM",), _describe, RULES + DEEPSEEK_RULES)
