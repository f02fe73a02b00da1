"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotation is not scaled."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import context_of, head_dim_of, sliding_blocks, stack, window_of
from quire.models.families.olmo2 import OLMO2_RULES, olmo2_block
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
    theta = c.number("rope_theta", 5e5)
    bases = {"full_attention": theta, "sliding_attention": theta}
    ropes = read_ropes(c, head_dim_of(c), bases, context=context_of(c))
    block, window = olmo2_block(c, rope=None), window_of(c, 4096)
    return stack(c, sliding_blocks(c, block, lambda i: (i + 1) % 4, window, ropes))


FAMILY = Family(("Olmo3ForCausalLM",), _describe, OLMO2_RULES)
