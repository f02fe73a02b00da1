"""CWM: Llama 3 with windows in three of four layers."""

from __future__ import annotations

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, mlp, rms, sliding_blocks, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    if "rope_scaling" not in c and "rope_parameters" not in c:
        raise LoadError("config.json lacks rope_scaling, which CWM needs.")
    attn = attention(c, usual_dim=128, theta=1e6)
    block = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-5))
    return stack(c, sliding_blocks(c, block, lambda i: i % 4, window_of(c, 8192)))


FAMILY = Family(("CwmForCausalLM",), _describe, RULES)
