"""Llama's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    mlp,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    deepseek_experts_of,
    sparse_after,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe_dots1(c: ConfigReader) -> Decoder:
    """dots.llm1: Qwen3's attention with DeepSeek-V3's experts after dense layers."""
    norm = rms(c, 1e-6)
    dense = Block(attention(c, qk_norm=norm, **biases(c)), mlp(c), norm)
    moe = deepseek_experts_of(c, renorm=c.flag("norm_topk_prob", False))
    window, first = window_of(c, 4096), c.integer("max_window_layers", 62, minimum=0)
    blocks = sliding_blocks(c, dense, lambda i: window is not None and i >= first, window)
    return stack(c, with_experts(blocks, moe, sparse_after(c)))


DOTS1 = Family(("Dots1ForCausalLM",), _describe_dots1, RULES + DEEPSEEK_RULES)


def _describe_solar_open(c: ConfigReader) -> Decoder:
    """Solar Open: Llama's attention with DeepSeek-V3's experts in every layer."""
    c.raw("intermediate_size", None)  # of dense layers, of which there are none
    c.only("first_k_dense_replace", 0)
    attn = attention(c, usual_dim=128, theta=1e6, qkv_bias=c.flag("attention_bias", False))
    return stack(c, Block(attn, deepseek_experts_of(c), rms(c, 1e-5)))


SOLAR_OPEN = Family(("SolarOpenForCausalLM",), _describe_solar_open, RULES + DEEPSEEK_RULES)
