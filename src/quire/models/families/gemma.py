"""Gemma 1 to 3, and VaultGemma."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    mlp,
    norm_rules,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm


def gemma_norm(c: ConfigReader) -> Norm:
    """RMS norm by 1 + weight."""
    return rms(c, 1e-6, "rms1p")


def gemma_attention(c: ConfigReader, dim: int | None = None, **facts: Any) -> Attention:
    """Attention with the biases that all Gemma configs may ask for."""
    return attention(c, head_dim=dim, usual_dim=256, **biases(c), **facts)


def gemma_top(c: ConfigReader) -> dict[str, Any]:
    """Fields around the blocks, the same in all Gemma models."""
    return {
        "embed_scale": c.integer("hidden_size") ** 0.5,
        "tie": c.flag("tie_word_embeddings", True),
    }


def _describe_gemma(c: ConfigReader) -> Decoder:
    """Gemma: norms by 1 + weight, a scaled embedding, gated gelu."""
    _check_activation(c)
    feed = mlp(c, act_key="hidden_activation", act="gelu_pytorch_tanh")
    return stack(c, Block(gemma_attention(c), feed, gemma_norm(c)), **gemma_top(c))


def _check_activation(c: ConfigReader) -> None:
    """The first files say `hidden_act: gelu` and mean the tanh form, as transformers knows."""
    act = c.raw("hidden_act", "gelu")
    if act not in ("gelu", "gelu_pytorch_tanh"):
        raise unsupported("hidden_act", act, "gelu_pytorch_tanh")
    c.only("hidden_activation", "gelu_pytorch_tanh")


GEMMA = Family(("GemmaForCausalLM",), _describe_gemma, RULES)


SANDWICH_RULES = (
    *norm_rules(
        attn_post="post_attention_layernorm",
        mlp_pre="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
    *RULES,
)


def sandwich(c: ConfigReader, attn: Attention, **facts: Any) -> Block:
    """The block of Gemma 2 and 3, with what differs as keywords."""
    c.only(
        "hidden_act", "gelu_pytorch_tanh"
    )  # some files repeat it; hidden_activation is what counts
    feed: Mlp = mlp(c, act_key="hidden_activation", act="gelu_pytorch_tanh")
    return Block(attn, feed, gemma_norm(c), **{"post": True, **facts})


def capped(c: ConfigReader, default: float | None) -> dict[str, Any]:
    """Gemma's top with the cap on logits."""
    cap = c.bound("final_logit_softcapping", default)
    return {**gemma_top(c), "logit_softcap": cap}


def _describe_gemma2(c: ConfigReader, **block: Any) -> Decoder:
    """Gemma 2: norms before and after each sub-layer, windows in every other layer, soft caps on
    scores and logits; VaultGemma without the norms after.
    """
    attn = gemma_attention(
        c,
        scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=c.bound("attn_logit_softcapping", 50.0),
    )
    block_of_all, window = sandwich(c, attn, **block), window_of(c, 4096)
    blocks = sliding_blocks(c, block_of_all, lambda layer: layer % 2 == 0, window)
    return stack(c, blocks, **capped(c, 30.0))


GEMMA2 = Family(("Gemma2ForCausalLM",), _describe_gemma2, SANDWICH_RULES)
VAULT = Family(("VaultGemmaForCausalLM",), partial(_describe_gemma2, post=False), SANDWICH_RULES)


def _describe_gemma3(c: ConfigReader) -> Decoder:
    """Gemma 3, text: Gemma 2 with q/k norms and a rope of its own for the sliding layers."""
    dim = head_dim_of(c, 256)
    scale = c.number("query_pre_attn_scalar", 256) ** -0.5
    c.only("attn_logit_softcapping", None)  # transformers has the key here, but ignores its value
    sees_all = c.flag("use_bidirectional_attention", False)
    norm = gemma_norm(c)
    attn = gemma_attention(c, dim, rope=None, scale=scale, qk_norm=norm, is_causal=not sees_all)
    # transformers 5 writes the period with an underscore in front
    period = c.integer("sliding_window_pattern", c.integer("_sliding_window_pattern", 6))
    window = window_of(c, 4096)
    if sees_all and window is not None:
        window = window // 2 + 1  # it counts both sides
    bases = {
        "full_attention": c.number("rope_theta", 1e6),
        "sliding_attention": c.number("rope_local_base_freq", 1e4),
    }
    ropes = read_ropes(c, dim, bases, context=context_of(c))
    blocks = sliding_blocks(c, sandwich(c, attn), lambda i: (i + 1) % period, window, ropes)
    return stack(c, blocks, **capped(c, None))


GEMMA3 = Family(("Gemma3ForCausalLM",), _describe_gemma3, SANDWICH_RULES)
