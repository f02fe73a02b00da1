"""Gemma: norms by 1 + weight, a scaled embedding, gated gelu."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Norm


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


def _describe(c: ConfigReader) -> Decoder:
    _check_activation(c)
    feed = mlp(c, act_key="hidden_activation", act="gelu_pytorch_tanh")
    return stack(c, Block(gemma_attention(c), feed, gemma_norm(c)), **gemma_top(c))


def _check_activation(c: ConfigReader) -> None:
    """The first files say `hidden_act: gelu` and mean the tanh form, which transformers takes it
    for too.
    """
    act = c.raw("hidden_act", "gelu")
    if act not in ("gelu", "gelu_pytorch_tanh"):
        raise unsupported("hidden_act", act, "gelu_pytorch_tanh")
    c.only("hidden_activation", "gelu_pytorch_tanh")


FAMILY = Family(("GemmaForCausalLM",), _describe, RULES)
