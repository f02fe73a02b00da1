"""StableLM: layer norms, partial rotation, sequential blocks or parallel ones with one norm."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, layer_norm, mlp, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("qk_layernorm", False)  # the 12b model: a norm with its own tensor for each head
    attn = attention(c, partial=0.25, qkv_bias=c.flag("use_qkv_bias", False))
    is_parallel = c.flag("use_parallel_residual", False)
    block = Block(attn, mlp(c), layer_norm(c), parallel="one_norm" if is_parallel else "no")
    return stack(c, block)


FAMILY = Family(("StableLmForCausalLM",), _describe, RULES)
