"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts after dense layers."""

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


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-6)
    dense = Block(attention(c, qk_norm=norm, **biases(c)), mlp(c), norm)
    moe = deepseek_experts_of(c, renorm=c.flag("norm_topk_prob", False))
    window, first = window_of(c, 4096), c.integer("max_window_layers", 62, minimum=0)
    blocks = sliding_blocks(c, dense, lambda i: window is not None and i >= first, window)
    return stack(c, with_experts(blocks, moe, sparse_after(c)))


FAMILY = Family(("Dots1ForCausalLM",), _describe, RULES + DEEPSEEK_RULES)
