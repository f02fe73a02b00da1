"""Llama 4's text model: attention within chunks in rotated layers, layers without positions whose
queries grow with them, one expert per token that its score multiplies from the front, and a shared
expert.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    mlp,
    num_layers_of,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import experts_of, shared_expert
from quire.models.positions import Temperature
from quire.models.rope_config import read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Moe, Norm

_STORED, _OURS = "{prefix}layers.{layer}.feed_forward.", "layers.{layer}.mlp."
_EXPERT = _OURS + "experts.{expert}."


_RULES = (
    *layer_rules({f"feed_forward.{p}_proj": f"mlp.{p}" for p in ("gate", "up", "down")}),
    rule(_STORED + "router.weight", _OURS + "router.weight"),
    rule(
        _STORED + "experts.gate_up_proj",
        _EXPERT + "gate.weight",
        _EXPERT + "up.weight",
        steps=("transpose", "stacked", "split"),
    ),
    rule(_STORED + "experts.down_proj", _EXPERT + "down.weight", steps=("transpose", "stacked")),
    *(
        rule(f"{_STORED}shared_expert.{p}_proj.weight", f"{_OURS}shared.{p}.weight")
        for p in ("gate", "up", "down")
    ),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-5)
    # `intermediate_size` is that of an expert here
    dense, moe = mlp(c, width=c.integer("intermediate_size_mlp")), _experts(c)
    mixers = _mixers(c, norm)
    pairs = zip(mixers, _has_experts(c), strict=True)
    return stack(c, [Block(mixer, moe if sparse else dense, norm) for mixer, sparse in pairs])


def _experts(c: ConfigReader) -> Moe:
    c.raw("for_llm_compressor", None)  # a form of the checkpoint for a tool
    width = c.integer("intermediate_size")
    return experts_of(
        c,
        "num_local_experts",
        width=width,
        score="sigmoid_topk",
        renorm=False,
        weighs_input=True,
        shared=shared_expert(c, width),
    )


def _has_experts(c: ConfigReader) -> list[bool]:
    """Whether layers have experts: `moe_layers`, or every `interleave_moe_layer_step`-th."""
    depth, every = num_layers_of(c), c.integer("interleave_moe_layer_step", 1)
    layers = c.raw("moe_layers", list(range(every - 1, depth, every)))
    if not isinstance(layers, list) or not all(layer in range(depth) for layer in layers):
        raise unsupported("moe_layers", layers, "a list of layer numbers")
    return [layer in layers for layer in range(depth)]


def _mixers(c: ConfigReader, norm: Norm) -> list[Attention]:
    """Each layer's attention: rotated or not, in chunks or not."""
    dim = head_dim_of(c)
    plain = attention(c, head_dim=dim, rope=None, **biases(c))
    bare = Norm("rms_bare", norm.eps) if c.flag("use_qk_norm", True) else None
    rope = read_rope(c, dim, theta=5e5, context=context_of(c), interleaved=True)
    rotated = replace(plain, rope=rope, qk_norm=bare, qk_norm_after_rope=bare is not None)
    # queries and keys are normed only where they are rotated
    unrotated = replace(plain, temperature=_temperature(c))
    rotates = _rotates(c)
    chunks = _chunks(c, rotates)
    return [
        replace(rotated if r else unrotated, chunk=chunk)
        for r, chunk in zip(rotates, chunks, strict=True)
    ]


def _temperature(c: ConfigReader) -> Temperature | None:
    """`attn_temperature_tuning`, for which released files have numbers, too."""
    strength, interval = c.number("attn_scale", 0.1), c.number("floor_scale", 8192.0)
    on = c.raw("attn_temperature_tuning", True)
    if not isinstance(on, int):
        raise unsupported("attn_temperature_tuning", on, "true, false or an integer")
    return Temperature(strength, interval) if on else None


def _rotates(c: ConfigReader) -> list[bool]:
    """`no_rope_layers`, 1 for rope; without it none in every `no_rope_layer_interval`-th."""
    depth, every = num_layers_of(c), c.integer("no_rope_layer_interval", 4)
    # released files have an empty list, which means the interval
    flags = c.raw("no_rope_layers", None) or [int((i + 1) % every != 0) for i in range(depth)]
    if not isinstance(flags, list) or len(flags) != depth or not {*flags} <= {0, 1}:
        raise unsupported("no_rope_layers", flags, "a list with 0 or 1 for each layer")
    return [flag == 1 for flag in flags]


def _chunks(c: ConfigReader, rotates: list[bool]) -> list[int | None]:
    """`attention_chunk_size` for chunked_attention layers, by default the rotated ones."""
    size = c.integer("attention_chunk_size", None)
    usual = ["chunked_attention" if r else "full_attention" for r in rotates]
    kinds = read_kinds(c, "layer_types", ("full_attention", "chunked_attention"), usual)
    return [size if kind == "chunked_attention" else None for kind in kinds]


FAMILY = Family(("Llama4ForCausalLM",), _describe, _RULES)
