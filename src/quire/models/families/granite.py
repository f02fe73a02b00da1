"""Granite: Llama with multipliers on embedding, scores, residuals and logits; Granite SWA with
windows, attention sinks, and a rotation of its own in each layer or none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    mlp,
    num_layers_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
    with_ropes,
)
from quire.models.positions import Rope
from quire.models.rope_config import LEAST_THETA
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe


def block_of(c: ConfigReader, feed: Mlp | Moe, eps: float, **facts: Any) -> Block:
    """Granite's block around a feed-forward part."""
    scale = c.number("attention_multiplier", 1.0)
    return Block(
        attention(c, scale=scale, **biases(c), **facts),
        feed,
        rms(c, eps),
        residual_scale=c.number("residual_multiplier", 1.0),
    )


def multipliers_of(c: ConfigReader) -> dict[str, float]:
    """The multipliers of the embedding and the logits."""
    return {
        "embed_scale": c.number("embedding_multiplier", 1.0),
        # Granite divides logits by the key; HyperCLOVA X multiplies with the key of the same name
        "logit_scale": 1 / c.number("logits_scaling", 1.0),
    }


def _describe(c: ConfigReader) -> Decoder:
    return stack(c, block_of(c, _mlp(c), 1e-6), **multipliers_of(c))


def _mlp(c: ConfigReader) -> Mlp:
    return mlp(c, bias=c.flag("mlp_bias", False))


def _describe_swa(c: ConfigReader) -> Decoder:
    return describe_swa(c, _mlp(c))


def describe_swa(c: ConfigReader, feed: Mlp | Moe) -> Decoder:
    """Granite SWA with this feed-forward part."""
    block = block_of(c, feed, 1e-5, sinks=True)
    blocks = sliding_blocks(c, block, lambda layer: layer % 4, window_of(c, 128))
    first = blocks[0].mixer
    assert isinstance(first, Attention), "with windows"
    blocks = with_ropes(blocks, _ropes(c, first.rope))
    return stack(c, blocks, **multipliers_of(c), tie=c.flag("tie_word_embeddings", True))


def _ropes(c: ConfigReader, rope: Rope | None) -> list[Rope | None]:
    """`layer_rope_theta` has a base for each layer, null or 0 for a layer that does not rotate."""
    assert rope is not None
    thetas = c.raw("layer_rope_theta", [rope.theta] * num_layers_of(c))
    if not isinstance(thetas, list) or len(thetas) != num_layers_of(c):
        raise unsupported("layer_rope_theta", thetas, "a list with one base per layer")
    for theta in thetas:
        if theta and not is_number(theta, LEAST_THETA):
            raise unsupported("layer_rope_theta", theta, f"null or at least {LEAST_THETA}")
    return [replace(rope, theta=float(theta)) if theta else None for theta in thetas]


GRANITE = Family(("GraniteForCausalLM",), _describe, RULES, scales_given=True)
SINKS = rule("{prefix}layers.{layer}.self_attn.sinks", "layers.{layer}.attn.sinks")
GRANITE_SWA = Family(("GraniteSWAForCausalLM",), _describe_swa, (*RULES, SINKS), scales_given=True)
