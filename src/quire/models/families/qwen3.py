"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, head_dim_of, mlp, rms, stack_of
from quire.models.families.qwen2 import qwen_layers
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    dim, norm, bias = head_dim_of(c, 128), rms(c, 1e-6), c.flag("attention_bias", False)
    both = {"qkv_bias": bias, "o_bias": bias, "is_causal": c.flag("is_causal", True)}
    attn = attention(c, head_dim=dim, qk_norm=norm, **both)
    return stack_of(c, qwen_layers(c, Block(attn, mlp(c), norm)))


FAMILY = Family(("Qwen3ForCausalLM",), _describe, RULES)
