"""MiMo: Qwen2, and layers that predict further tokens, which are left out."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.families.qwen2 import qwen_layers
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.raw("num_nextn_predict_layers", None)
    attn = attention(c, qkv_bias=c.flag("attention_bias", True))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), rms(c, 1e-6))))


FAMILY = Family(("MiMoForCausalLM",), _describe, RULES, ignored=(r"mtp_layers\..*",))
