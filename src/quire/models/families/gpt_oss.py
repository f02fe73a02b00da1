"""gpt-oss, its experts in MXFP4 as published or in bfloat16: attention sinks, windows in every
other layer, bounded expert gates.
"""

from __future__ import annotations

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    num_experts_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.rules import Family, Rule, Step, rule
from quire.models.spec import Block, Decoder, Moe

_STORED, _OURS = "{prefix}layers.{layer}.", "layers.{layer}."


def _expert_rule(stored: str, leaf: str, *parts: str) -> Rule:
    """One tensor for all experts; gate and up take turns in its last axis, weights are stored input
    first.
    """
    steps: tuple[Step, ...] = ("stacked",) if len(parts) == 1 else ("stacked", "deal")
    if leaf == "weight":
        steps = ("transpose", *steps)
    targets = (f"{_OURS}mlp.experts.{{expert}}.{part}.{leaf}" for part in parts)
    return rule(f"{_STORED}mlp.experts.{stored}", *targets, steps=steps)


_RULES = (
    rule(_STORED + "self_attn.sinks", _OURS + "attn.sinks"),
    rule(_STORED + "mlp.router.{leaf}", _OURS + "mlp.router.{leaf}"),
    _expert_rule("gate_up_proj", "weight", "gate", "up"),
    _expert_rule("gate_up_proj_bias", "bias", "gate", "up"),
    _expert_rule("down_proj", "weight", "down"),
    _expert_rule("down_proj_bias", "bias", "down"),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    c.only("swiglu_alpha", 1.702)  # the constant in ops.moe's bounded gate
    c.only("hidden_act", "silu")
    if "rope_scaling" not in c and "rope_parameters" not in c:
        raise LoadError("config.json lacks rope_scaling, which gpt-oss needs.")
    c.raw("initial_context_length", None)  # rope_scaling repeats it
    attn = attention(c, theta=150000.0, sinks=True, **biases(c, True))
    block = Block(attn, _experts(c), rms(c, 1e-5, "rms_late_cast"))
    return stack(c, sliding_blocks(c, block, lambda i: i % 2 == 0, window_of(c, 128)))


def _experts(c: ConfigReader) -> Moe:
    experts = num_experts_of(c, "num_local_experts")
    top_k = c.integer("num_experts_per_tok", min(4, experts), maximum=experts)
    c.only("experts_per_token", top_k)
    return Moe(
        experts=experts,
        top_k=top_k,
        width=c.integer("intermediate_size"),
        score="softmax_topk",
        bias=True,
        router_bias=True,
        clamp=c.number("swiglu_limit", 7.0),
    )


FAMILY = Family(("GptOssForCausalLM",), _describe, _RULES)
