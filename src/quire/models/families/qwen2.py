"""Qwen2 and 2.5: Llama with biases on q, k and v, and windows from some layer on where they are
switched on.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, sliding_blocks, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def qwen_layers(c: ConfigReader, block: Block) -> list[Block]:
    """The block of each layer: `layer_types`, else windows from `max_window_layers` on if
    `use_sliding_window`.
    """
    c.only("use_mrope", False)
    if not c.flag("is_causal", True):
        c.only("use_sliding_window", False)
    window, first = window_of(c, 4096), c.integer("max_window_layers", 28, minimum=0)
    window = window if c.flag("use_sliding_window", False) else None
    return sliding_blocks(c, block, lambda i: window is not None and i >= first, window)


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, qkv_bias=True, is_causal=c.flag("is_causal", True))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), rms(c, 1e-6))))


FAMILY = Family(("Qwen2ForCausalLM",), _describe, RULES)
