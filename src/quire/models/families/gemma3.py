"""Gemma 3, text: Gemma 2 with q/k norms and a rope of its own for the sliding layers."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.gemma import gemma_attention, gemma_norm
from quire.models.families.gemma2 import SANDWICH_RULES, capped, sandwich
from quire.models.families.llama import context_of, head_dim_of, sliding_blocks, stack, window_of
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
    dim = head_dim_of(c, 256)
    scale = c.number("query_pre_attn_scalar", 256) ** -0.5
    c.only("attn_logit_softcapping", None)  # transformers has the key here, but ignores its value
    sees_all = c.flag("use_bidirectional_attention", False)
    norm = gemma_norm(c)
    attn = gemma_attention(c, dim, rope=None, scale=scale, qk_norm=norm, is_causal=not sees_all)
    # transformers 5 writes the period with an underscore in front
    period = c.integer("sliding_window_pattern", c.integer("_sliding_window_pattern", 6))
    window = window_of(c, 4096)
    if sees_all and window is not None:
        window = window // 2 + 1  # it counts both sides
    bases = {
        "full_attention": c.number("rope_theta", 1e6),
        "sliding_attention": c.number("rope_local_base_freq", 1e4),
    }
    ropes = read_ropes(c, dim, bases, context=context_of(c))
    blocks = sliding_blocks(c, sandwich(c, attn), lambda i: (i + 1) % period, window, ropes)
    return stack(c, blocks, **capped(c, None))


FAMILY = Family(("Gemma3ForCausalLM",), _describe, SANDWICH_RULES)
