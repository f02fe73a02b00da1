"""Ministral 3 and Devstral 2: Mistral whose queries grow with their position."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, attention, mlp, rms, stack, window_of
from quire.models.positions import Temperature
from quire.models.rope_config import only_section
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    attn = attention(
        c, usual_dim=128, theta=1e6, window=window_of(c), temperature=temperature_of(c)
    )
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5)))


def temperature_of(c: ConfigReader) -> Temperature | None:
    """The growth is counted in lengths of the original context, from the first token on."""
    rope = only_section(c)
    if rope is None:  # which means a scaling to transformers, and no published file leaves it out
        raise unsupported("rope_parameters", None, "an object with llama_4_scaling_beta")
    rope.ignore("max_position_embeddings")  # which transformers copies into the object
    strength = rope.number("llama_4_scaling_beta", minimum=0.0)
    original = rope.integer("original_max_position_embeddings")
    return Temperature(strength, float(original), first=0) if strength else None


FAMILY = Family(("Ministral3ForCausalLM",), _describe, RULES)
