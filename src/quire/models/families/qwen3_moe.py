"""Qwen3 mixture of experts: Qwen3's attention, experts in the layers that the config says."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ACTIVATIONS,
    RULES,
    attention,
    mlp,
    num_experts_of,
    num_layers_of,
    rms,
    stack_of,
    window_of,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Moe

_STORED, _OURS = "{prefix}layers.{layer}.mlp.", "layers.{layer}.mlp."
_MOE_RULES = (
    rule(_STORED + "gate.weight", _OURS + "router.weight"),
    *(
        rule(
            f"{_STORED}experts.{{expert}}.{part}_proj.weight",
            f"{_OURS}experts.{{expert}}.{part}.weight",
        )
        for part in ("gate", "up", "down")
    ),
)


def _describe(c: ConfigReader) -> Decoder:
    norm, bias = rms(c, 1e-6), c.flag("attention_bias", False)
    attn = attention(c, qk_norm=norm, qkv_bias=bias, o_bias=bias, window=_window(c))
    dense = Block(attn, mlp(c), norm)
    sparse = replace(dense, mlp=_experts(c))
    return stack_of(c, [sparse if s else dense for s in _is_sparse(c)])


def _window(c: ConfigReader) -> int | None:
    """All layers or none: this family reads no `layer_types`."""
    c.raw("max_window_layers", None)
    window = window_of(c, 4096)
    return window if c.flag("use_sliding_window", False) else None


def _experts(c: ConfigReader) -> Moe:
    experts = _num_experts(c)
    return Moe(
        experts=experts,
        top_k=c.integer("num_experts_per_tok", maximum=experts),
        width=c.integer("moe_intermediate_size"),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
        renorm=c.flag("norm_topk_prob", False),
    )


def _num_experts(c: ConfigReader) -> int:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    count = num_experts_of(c, "num_experts" if "num_experts" in c else "num_local_experts")
    c.only("num_local_experts", count)
    return count


def _is_sparse(c: ConfigReader) -> list[bool]:
    depth, every = num_layers_of(c), c.integer("decoder_sparse_step", 1)
    dense = c.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise unsupported("mlp_only_layers", dense, "a list of layer numbers")
    dense = frozenset(dense)
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(depth)]


FAMILY = Family(("Qwen3MoeForCausalLM",), _describe, RULES + _MOE_RULES)
