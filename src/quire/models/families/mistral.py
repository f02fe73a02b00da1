"""Mistral and what follows it: Ministral, Ministral 3, Devstral 2 and Mixtral."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ACTIVATIONS,
    RULES,
    attention,
    mlp,
    num_experts_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.positions import Temperature
from quire.models.rope_config import only_section
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Moe


def _describe_mistral(c: ConfigReader) -> Decoder:
    """Mistral: Llama with a sliding window in every layer."""
    attn = attention(c, window=window_of(c, 4096))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


MISTRAL = Family(("MistralForCausalLM",), _describe_mistral, RULES)


def _describe_ministral(c: ConfigReader) -> Decoder:
    """Ministral: Mistral with windows in the layers that the config says."""
    window = window_of(c, 4096)
    block = Block(attention(c), mlp(c), rms(c, 1e-6))
    return stack(c, sliding_blocks(c, block, lambda _: window is not None, window))


MINISTRAL = Family(("MinistralForCausalLM",), _describe_ministral, RULES)


def _describe_ministral3(c: ConfigReader) -> Decoder:
    """Ministral 3 and Devstral 2: Mistral whose queries grow with their position."""
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


MINISTRAL3 = Family(("Ministral3ForCausalLM",), _describe_ministral3, RULES)


_STORED, _OURS = "{prefix}layers.{layer}.block_sparse_moe.", "layers.{layer}.mlp."
_RULES = (
    rule(_STORED + "gate.weight", _OURS + "router.weight"),
    *(
        rule(
            f"{_STORED}experts.{{expert}}.{stored}.weight",
            f"{_OURS}experts.{{expert}}.{ours}.weight",
        )
        for stored, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
    *RULES,
)


def _describe_mixtral(c: ConfigReader) -> Decoder:
    """Mixtral: Mistral with a mixture of experts in every layer."""
    attn = attention(c, theta=1e6, window=window_of(c))
    experts = num_experts_of(c, "num_local_experts")
    moe = Moe(
        experts=experts,
        top_k=c.integer("num_experts_per_tok", maximum=experts),
        width=c.integer("intermediate_size"),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    return stack(c, Block(attn, moe, rms(c, 1e-5)))


MIXTRAL = Family(("MixtralForCausalLM",), _describe_mixtral, _RULES)
