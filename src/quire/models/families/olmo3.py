"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotation is not scaled."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    context_of,
    head_dim_of,
    read_layer_types,
    stack_of,
    window_of,
    with_ropes,
    with_windows,
)
from quire.models.families.olmo2 import OLMO2_RULES, olmo2_block
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
    theta = c.number("rope_theta", 5e5)
    bases = {"full_attention": theta, "sliding_attention": theta}
    ropes = read_ropes(c, head_dim_of(c), bases, context=context_of(c))
    kinds = read_layer_types(c, lambda layer: (layer + 1) % 4)
    blocks = with_windows(olmo2_block(c, rope=None), kinds, window_of(c, 4096))
    return stack_of(c, with_ropes(blocks, [ropes[kind] for kind in kinds]))


FAMILY = Family(("Olmo3ForCausalLM",), _describe, OLMO2_RULES)
