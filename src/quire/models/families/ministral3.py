"""Ministral 3 and Devstral 2: Mistral whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, attention, mlp, rms, stack, window_of
from quire.models.positions import Temperature
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_OF_ROPE = ("llama_4_scaling_beta", "max_position_embeddings")
"""Keys of the rope object that are not about the rotation."""


def describe_ministral3(c: ConfigReader) -> Decoder:
    """Mistral's layers, whose queries have a temperature."""
    attn = attention(
        c,
        usual_dim=128,
        theta=1e6,
        window=window_of(c),
        rope_facts={"ignored": _OF_ROPE},
    )
    return stack(c, Block(replace(attn, temperature=_temperature(c)), mlp(c), rms(c, 1e-5)))


def _temperature(c: ConfigReader) -> Temperature | None:
    rope = c.raw("rope_parameters", {})
    section = ConfigReader(rope if isinstance(rope, dict) else {}, "rope_parameters.", is_part=True)
    strength = section.number("llama_4_scaling_beta", None, minimum=0.0)
    if strength is None:
        allowed = "a number, by which queries grow (0: not at all)"
        raise unsupported("rope_parameters.llama_4_scaling_beta", None, allowed)
    interval = section.integer("original_max_position_embeddings")
    return Temperature(strength, interval, first=0.0) if strength else None


FAMILY = Family(("Ministral3ForCausalLM",), describe_ministral3, RULES)
