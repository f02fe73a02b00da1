"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts after dense layers."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    mlp,
    num_layers_of,
    read_layer_types,
    rms,
    stack_of,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    deepseek_experts_of,
    sparse_after,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-6)
    dense = Block(attention(c, qk_norm=norm, **biases(c)), mlp(c), norm)
    moe = deepseek_experts_of(c, renorm=c.flag("norm_topk_prob", False))
    blocks = with_windows(dense, _layer_types(c), window_of(c, 4096))
    return stack_of(c, with_experts(blocks, moe, sparse_after(c)))


def _layer_types(c: ConfigReader) -> list[str]:
    """`layer_types`, else windows from `max_window_layers` on."""
    depth, first = num_layers_of(c), c.integer("max_window_layers", 62, minimum=0)
    first = depth if window_of(c, 4096) is None else first
    return read_layer_types(c, lambda layer: layer >= first)


FAMILY = Family(("Dots1ForCausalLM",), _describe, RULES + DEEPSEEK_RULES)
