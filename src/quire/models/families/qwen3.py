"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack
from quire.models.families.qwen2 import qwen_layers
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm, is_causal = rms(c, 1e-6), c.flag("is_causal", True)
    attn = attention(c, usual_dim=128, qk_norm=norm, is_causal=is_causal, **biases(c))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), norm)))


FAMILY = Family(("Qwen3ForCausalLM",), _describe, RULES)
