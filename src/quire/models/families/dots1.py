"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts after dense layers."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    mlp,
    num_layers_of,
    read_layer_types,
    rms,
    stack_of,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import DEEPSEEK_RULES, deepseek_experts_of, sparse_after
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm, bias = rms(c, 1e-6), c.flag("attention_bias", False)
    dense = Block(attention(c, qk_norm=norm, qkv_bias=bias, o_bias=bias), mlp(c), norm)
    moe = deepseek_experts_of(c, renorm=c.flag("norm_topk_prob", False))
    blocks = with_windows(dense, _layer_types(c), window_of(c, 4096))
    pairs = zip(blocks, sparse_after(c), strict=True)
    return stack_of(c, [replace(block, mlp=moe) if sparse else block for block, sparse in pairs])


def _layer_types(c: ConfigReader) -> list[str]:
    """`layer_types`, else windows from `max_window_layers` on."""
    depth, first = num_layers_of(c), c.integer("max_window_layers", 62, minimum=0)
    first = depth if window_of(c, 4096) is None else first
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(depth)]
    return read_layer_types(c, default)


FAMILY = Family(("Dots1ForCausalLM",), _describe, RULES + DEEPSEEK_RULES)
