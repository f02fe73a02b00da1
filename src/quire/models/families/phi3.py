"""Phi-3, 3.5 and 4: Llama with q, k and v and gate and up stored as one tensor each, long contexts
through LongRoPE.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, layer_rules, mlp, rms, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_FUSED_RULES = layer_rules(
    {"self_attn.qkv_proj": "attn.q attn.k attn.v", "mlp.gate_up_proj": "mlp.gate mlp.up"}
)


def _describe(c: ConfigReader) -> Decoder:
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.only(bias, False)
    for factor in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini: only 1 has a meaning
        c.only(factor, 1)
    original = c.integer("original_max_position_embeddings", 4096)
    scalings = {"kinds": ("default", "longrope"), "original": original}
    attn = attention(c, rope_facts=scalings, window=window_of(c))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5)))


FAMILY = Family(("Phi3ForCausalLM",), _describe, _FUSED_RULES + RULES)
