"""Nemotron 4 and Minitron: layer norms by 1 + weight, half of each head rotated, squared relu."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, layer_norm, mlp, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(c, partial=0.5, **biases(c))
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", False))
    return stack(c, Block(attn, feed, layer_norm(c, "norm_eps", kind="layer1p")))


FAMILY = Family(("NemotronForCausalLM",), _describe, RULES)
