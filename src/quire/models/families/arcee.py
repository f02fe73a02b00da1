"""Arcee (AFM): Llama with an ungated feed-forward part and squared relu."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", False))
    return stack(c, Block(attention(c, **biases(c)), feed, rms(c, 1e-5)))


FAMILY = Family(("ArceeForCausalLM",), _describe, RULES)
