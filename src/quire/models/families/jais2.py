"""Jais 2: Llama with layer norms, biases, and an ungated feed-forward part with squared relu."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, layer_norm, mlp, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, **biases(c, True))
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", True))
    return stack(c, Block(attn, feed, layer_norm(c)))


FAMILY = Family(("Jais2ForCausalLM",), _describe, RULES)
