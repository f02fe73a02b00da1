"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    mlp,
    num_layers_of,
    read_layer_types,
    rms,
    stack,
    window_of,
    with_ropes,
    with_windows,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.raw("max_window_layers", None)  # says nothing where layer types are listed or follow
    attn = attention(c, theta=2e6, **biases(c))
    block = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-6))
    rotated = _rotated(c)
    blocks = _windowed(c, block, rotated)
    blocks = with_ropes(blocks, [attn.rope if turns else None for turns in rotated])
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True))


def _rotated(c: ConfigReader) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer that does rotate."""
    every = c.integer("no_rope_layer_interval", 4)
    depth = num_layers_of(c)
    flags = c.raw("no_rope_layers", [int((i + 1) % every != 0) for i in range(depth)])
    if not isinstance(flags, list) or len(flags) != depth or not all(f in (0, 1) for f in flags):
        raise unsupported("no_rope_layers", flags, "a list with 0 or 1 per layer")
    return [bool(flag) for flag in flags]


def _windowed(c: ConfigReader, block: Block, rotated: list[bool]) -> list[Block]:
    """Blocks with windows, where they are switched on, in the layers that do not rotate."""
    window = window_of(c)
    is_on = c.flag("use_sliding_window", False) and window is not None
    kinds = read_layer_types(c, lambda layer: is_on and not rotated[layer])
    return with_windows(block, kinds, window) if is_on else [block] * len(kinds)


FAMILY = Family(("SmolLM3ForCausalLM",), _describe, RULES)
