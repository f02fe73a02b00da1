"""Granite 3 and 4: dense, with experts, and with Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, is_number, unsupported
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
    sliding_blocks,
    stack,
    window_of,
    with_ropes,
)
from quire.models.families.mamba import MAMBA2_NAMES, mamba2_of_hybrid, mixer_rules
from quire.models.families.mixtures import (
    experts_of,
    router_rule,
    shared_expert,
    stacked_expert_rules,
)
from quire.models.positions import Rope
from quire.models.rope_config import LEAST_THETA, read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe


def block_of(c: ConfigReader, feed: Mlp | Moe, eps: float, **facts: Any) -> Block:
    """Granite's block around a feed-forward part."""
    scale = c.number("attention_multiplier", 1.0)
    return Block(
        attention(c, scale=scale, **biases(c), **facts),
        feed,
        rms(c, eps),
        residual_scale=c.number("residual_multiplier", 1.0),
    )


def multipliers_of(c: ConfigReader) -> dict[str, float]:
    """The multipliers of the embedding and the logits."""
    return {
        "embed_scale": c.number("embedding_multiplier", 1.0),
        # Granite divides logits by the key; HyperCLOVA X multiplies with the key of the same name
        "logit_scale": 1 / c.number("logits_scaling", 1.0),
    }


def _describe_granite(c: ConfigReader) -> Decoder:
    """Granite: Llama with multipliers on embedding, scores, residuals and logits."""
    return stack(c, block_of(c, _mlp(c), 1e-6), **multipliers_of(c))


def _mlp(c: ConfigReader) -> Mlp:
    return mlp(c, bias=c.flag("mlp_bias", False))


def _describe_swa(c: ConfigReader) -> Decoder:
    """Granite SWA: Granite with windows, attention sinks, and a rotation of each layer or none."""
    return describe_swa(c, _mlp(c))


def describe_swa(c: ConfigReader, feed: Mlp | Moe) -> Decoder:
    """Granite SWA with this feed-forward part."""
    block = block_of(c, feed, 1e-5, sinks=True)
    blocks = sliding_blocks(c, block, lambda layer: layer % 4, window_of(c, 128))
    first = blocks[0].mixer
    assert isinstance(first, Attention), "with windows"
    blocks = with_ropes(blocks, _ropes(c, first.rope))
    return stack(c, blocks, **multipliers_of(c), tie=c.flag("tie_word_embeddings", True))


def _ropes(c: ConfigReader, rope: Rope | None) -> list[Rope | None]:
    """`layer_rope_theta` has a base for each layer, null or 0 for a layer that does not rotate."""
    assert rope is not None
    thetas = c.raw("layer_rope_theta", [rope.theta] * num_layers_of(c))
    if not isinstance(thetas, list) or len(thetas) != num_layers_of(c):
        raise unsupported("layer_rope_theta", thetas, "a list with one base per layer")
    for theta in thetas:
        if theta and not is_number(theta, LEAST_THETA):
            raise unsupported("layer_rope_theta", theta, f"null or at least {LEAST_THETA}")
    return [replace(rope, theta=float(theta)) if theta else None for theta in thetas]


GRANITE = Family(("GraniteForCausalLM",), _describe_granite, RULES, scales_given=True)
SINKS = rule("{prefix}layers.{layer}.self_attn.sinks", "layers.{layer}.attn.sinks")
GRANITE_SWA = Family(("GraniteSWAForCausalLM",), _describe_swa, (*RULES, SINKS), scales_given=True)


_STORED, _OURS = "{prefix}layers.{layer}.", "layers.{layer}.mlp."
_INPUTS = ("gate", "up")
EXPERT_RULES = (
    router_rule("block_sparse_moe.router.layer"),
    rule(
        _STORED + "block_sparse_moe.input_linear.weight",
        *(f"{_OURS}experts.{{expert}}.{part}.weight" for part in _INPUTS),
        steps=("stacked", "split"),
    ),
    rule(
        _STORED + "block_sparse_moe.output_linear.weight",
        _OURS + "experts.{expert}.down.weight",
        steps=("stacked",),
    ),
    rule(
        _STORED + "shared_mlp.input_linear.weight",
        *(f"{_OURS}shared.{part}.weight" for part in _INPUTS),
        steps=("split",),
    ),
    rule(_STORED + "shared_mlp.output_linear.weight", _OURS + "shared.down.weight"),
)


def _moe(c: ConfigReader) -> Moe:
    shared = c.integer("shared_intermediate_size", 0, minimum=0)
    return experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="softmax_topk",
        shared=shared_expert(c, shared) if shared else None,
    )


def _describe_granite_moe(c: ConfigReader) -> Decoder:
    """Granite with experts: a softmax over the chosen logits, a shared expert in some forms."""
    return stack(c, block_of(c, _moe(c), 1e-6), **multipliers_of(c))


PLAIN = Family(
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _describe_granite_moe,
    RULES + EXPERT_RULES,
    scales_given=True,
)


def _describe_moe_swa(c: ConfigReader) -> Decoder:
    """Granite SWA with the experts of Granite."""
    return describe_swa(c, _moe(c))


SWA = Family(
    ("GraniteMoeSWAForCausalLM",),
    _describe_moe_swa,
    (
        router_rule("block_sparse_moe.router"),
        *stacked_expert_rules("block_sparse_moe.experts"),
        *EXPERT_RULES,
        *RULES,
        SINKS,
    ),
    scales_given=True,
)


_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""Layer types as old and new files call them."""


def _describe_granite_hybrid(c: ConfigReader) -> Decoder:
    """Granite 4: mostly Mamba-2, some attention, Granite's multipliers; with experts or without."""
    c.only("normalization_function", "rmsnorm")
    norm = rms(c, 1e-6)
    attn = attention(c, rope=_rope(c), scale=c.number("attention_multiplier", 1.0), **biases(c))
    scale = c.number("residual_multiplier", 1.0)
    attending = Block(attn, _feed_forward(c), norm, residual_scale=scale)
    recurrent = replace(attending, mixer=mamba2_of_hybrid(c, norm_eps=norm.eps))
    blocks = [recurrent if kind == "mamba" else attending for kind in _layer_types(c)]
    return stack(c, blocks, **multipliers_of(c))


def _feed_forward(c: ConfigReader) -> Mlp | Moe:
    shared = shared_expert(c, c.integer("shared_intermediate_size", 1024))
    # read below although unused, since the reader refuses keys that nobody asked for
    if "num_local_experts" not in c or c.raw("num_local_experts", None) == 0:
        c.raw("num_local_experts", None)
        c.raw("num_experts_per_tok", None)
        c.raw("intermediate_size", None)  # of experts
        return shared
    width = c.integer("intermediate_size")
    return experts_of(c, "num_local_experts", width=width, score="softmax_topk", shared=shared)


def _rope(c: ConfigReader) -> Rope | None:
    is_rotated = c.raw("position_embedding_type", "nope") == "rope"
    c.only("position_embedding_type", "nope", "rope")
    # read in any case: models without positions keep the keys of a rotation in their files
    rope = read_rope(c, head_dim_of(c), context=context_of(c))
    return rope if is_rotated else None


def _layer_types(c: ConfigReader) -> list[str]:
    depth = num_layers_of(c)
    older = c.raw("layers_block_type", ["mamba"] * depth)
    return [_KINDS[kind] for kind in read_kinds(c, "layer_types", _KINDS, older)]


GRANITE_HYBRID = Family(
    ("GraniteMoeHybridForCausalLM",),
    _describe_granite_hybrid,
    (
        *mixer_rules("mamba", MAMBA2_NAMES),
        *EXPERT_RULES,
        *layer_rules(
            {
                "shared_mlp.input_linear": "mlp.gate mlp.up",
                "shared_mlp.output_linear": "mlp.down",
            }
        ),
        *RULES,
    ),
    scales_given=True,
)
