"""IQuest-Coder: Llama with heads of 128 values."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("clip_qkv", None)
    c.only("use_sliding_window", False)
    c.ignore("sliding_window", "max_window_layers")  # of windows, which are switched off
    attn = attention(c, usual_dim=128, **biases(c))
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-5)))


FAMILY = Family(("IQuestCoderForCausalLM",), _describe, RULES)
