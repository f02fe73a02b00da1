"""Cohere 1 and 2: parallel blocks with one layer norm without bias, neighbours rotated, scaled
logits; Cohere 2 with windows, and no rotation in the layers that see everything.
"""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    layer_norm,
    mlp,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder


def _block(c: ConfigReader, **facts: Any) -> Block:
    attn = attention(c, theta=5e5, interleaved=True, **biases(c), **facts)
    return Block(attn, mlp(c), layer_norm(c, bias=False), parallel="one_norm")


def top_of(c: ConfigReader) -> dict[str, Any]:
    """The factor of logits, and whether the head is the embedding."""
    return {
        "logit_scale": c.number("logit_scale", 0.0625),
        "tie": c.flag("tie_word_embeddings", True),
    }


def _describe_1(c: ConfigReader) -> Decoder:
    norm = layer_norm(c, bias=False) if c.flag("use_qk_norm", False) else None
    return stack(c, _block(c, qk_norm=norm, qk_norm_over="per_head"), **top_of(c))


def _describe_2(c: ConfigReader) -> Decoder:
    _check_original_keys(c)
    every = c.integer("sliding_window_pattern", 4)
    block = _block(c)
    assert isinstance(block.mixer, Attention)
    ropes = {"sliding_attention": block.mixer.rope, "full_attention": None}
    window = window_of(c, 4096)
    blocks = sliding_blocks(c, block, lambda layer: (layer + 1) % every, window, ropes)
    return stack(c, blocks, **top_of(c))


def _check_original_keys(c: ConfigReader) -> None:
    """The first files say of themselves what the family is."""
    c.only("layer_switch", c.integer("sliding_window_pattern", 4))
    c.only("order_of_interleaved_layers", "local_attn_first")
    c.only("position_embedding_type", "rope_gptj")
    c.only("rotary_pct", 1.0)
    c.only("use_embedding_sharing", c.flag("tie_word_embeddings", True))
    for key in ("use_gated_activation", "use_parallel_block"):
        c.only(key, True)
    for key in ("use_parallel_embedding", "use_qk_norm"):
        c.only(key, False)


COHERE = Family(("CohereForCausalLM",), _describe_1, RULES)
COHERE2 = Family(("Cohere2ForCausalLM",), _describe_2, RULES)
