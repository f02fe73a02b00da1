"""Qwen3 mixture of experts: Qwen3's attention, experts in the layers that the config says."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import LAYER, RULES, attention, biases, mlp, rms, stack, window_of
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    router_rule,
    sparse_by_step,
    with_experts,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    return _with_weights(c, renorm=c.flag("norm_topk_prob", False))


def _describe_in_vl(c: ConfigReader) -> Decoder:
    c.only("norm_topk_prob", True)  # which transformers does not read there
    return _with_weights(c, renorm=True)


def _with_weights(c: ConfigReader, *, renorm: bool) -> Decoder:
    """`renorm`: the weights of a token's experts are made to sum to 1."""
    norm = rms(c, 1e-6)
    attn = attention(c, qk_norm=norm, window=_window(c), **biases(c))
    dense = Block(attn, mlp(c), norm)
    moe = experts_of(c, _num_experts_key(c), renorm=renorm)
    return stack(c, with_experts(dense, moe, sparse_by_step(c)))


def _window(c: ConfigReader) -> int | None:
    """All layers or none: this family reads no `layer_types`."""
    c.raw("max_window_layers", None)
    window = window_of(c, 4096)
    return window if c.flag("use_sliding_window", False) else None


def _num_experts_key(c: ConfigReader) -> str:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    key = "num_experts" if "num_experts" in c else "num_local_experts"
    c.only("num_local_experts", c.raw(key, None))
    return key


_EXPERT = "layers.{layer}.mlp.experts.{expert}."
_STACKED_RULES = (
    router_rule("mlp.gate"),
    rule(
        LAYER + "mlp.experts.gate_up_proj",
        _EXPERT + "gate.weight",
        _EXPERT + "up.weight",
        steps=("transpose", "stacked", "split"),
    ),
    rule(LAYER + "mlp.experts.down_proj", _EXPERT + "down.weight", steps=("transpose", "stacked")),
)

FAMILY = Family(("Qwen3MoeForCausalLM",), _describe, RULES + QWEN_RULES)
IN_VL = Family(
    ("Qwen3VLMoeTextModel",), _describe_in_vl, RULES + _STACKED_RULES, turns_by_shape=True
)
"""In Qwen3-VL, whose files have all experts of a layer in one tensor; those of transformers 5 as
the products take them.
"""
