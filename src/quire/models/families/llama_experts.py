"""Llama's attention with experts of several kinds."""

from __future__ import annotations

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    mlp,
    num_experts_of,
    num_layers_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    QWEN_RULES,
    deepseek_experts_of,
    experts_of,
    router_rule,
    shared_expert,
    shared_rules,
    sparse_after,
    sparse_by_step,
    sparse_by_type,
    with_experts,
)
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, Rule, Step, rule
from quire.models.spec import Block, Decoder, Moe


def _describe_dots1(c: ConfigReader) -> Decoder:
    """dots.llm1: Qwen3's attention with DeepSeek-V3's experts after dense layers."""
    norm = rms(c, 1e-6)
    dense = Block(attention(c, qk_norm=norm, **biases(c)), mlp(c), norm)
    moe = deepseek_experts_of(c, renorm=c.flag("norm_topk_prob", False))
    window, first = window_of(c, 4096), c.integer("max_window_layers", 62, minimum=0)
    blocks = sliding_blocks(c, dense, lambda i: window is not None and i >= first, window)
    return stack(c, with_experts(blocks, moe, sparse_after(c)))


DOTS1 = Family(("Dots1ForCausalLM",), _describe_dots1, RULES + DEEPSEEK_RULES)


def _describe_solar_open(c: ConfigReader) -> Decoder:
    """Solar Open: Llama's attention with DeepSeek-V3's experts in every layer."""
    c.raw("intermediate_size", None)  # of dense layers, of which there are none
    c.only("first_k_dense_replace", 0)
    attn = attention(c, usual_dim=128, theta=1e6, qkv_bias=c.flag("attention_bias", False))
    return stack(c, Block(attn, deepseek_experts_of(c), rms(c, 1e-5)))


SOLAR_OPEN = Family(("SolarOpenForCausalLM",), _describe_solar_open, RULES + DEEPSEEK_RULES)


_EXPERTS = "layers.{layer}.mlp.experts.{expert}."


def _describe_aria(c: ConfigReader) -> Decoder:
    """Aria, text: Llama with experts next to shared ones, stored as one tensor of all."""
    c.only("mlp_bias", False)
    c.only("hidden_act", "silu")
    width = c.integer("intermediate_size", 4096)
    c.only("moe_intermediate_size", width)
    moe = experts_of(
        c,
        "moe_num_experts",
        "moe_topk",
        width=width,
        score="softmax_topk",
        shared=shared_expert(c, width * c.integer("moe_num_shared_experts", 2)),
    )
    return stack(c, Block(attention(c, **biases(c)), moe, rms(c, 1e-6)))


ARIA = Family(
    ("AriaTextForCausalLM",),
    _describe_aria,
    (
        rule(
            LAYER + "mlp.experts.fc1.weight",
            _EXPERTS + "gate.weight",
            _EXPERTS + "up.weight",
            steps=("transpose", "stacked", "split"),
        ),
        rule(
            LAYER + "mlp.experts.fc2.weight",
            _EXPERTS + "down.weight",
            steps=("transpose", "stacked"),
        ),
        router_rule("mlp.router"),
        *shared_rules("mlp.shared_experts"),
        *RULES,
    ),
)


_OF_DRAFTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
)
"""Keys of layers that predict further tokens, which are left out."""


def _describe_mellum(c: ConfigReader) -> Decoder:
    """Mellum: Qwen3's experts in some layers, windows with a rotation of their own in some."""
    c.ignore(*_OF_DRAFTS)
    c.rename(num_experts="num_local_experts")
    norm = rms(c, 1e-6)
    dim = head_dim_of(c, 128)
    bases = {"full_attention": 5e5, "sliding_attention": 1e4}
    ropes = read_ropes(c, dim, bases, context=context_of(c))
    attn = attention(c, head_dim=dim, rope=None, qk_norm=norm, **biases(c))
    blocks = sliding_blocks(
        c, Block(attn, mlp(c), norm), lambda _: False, window_of(c, 1024), ropes
    )
    moe = experts_of(c, "num_experts", renorm=c.flag("norm_topk_prob", True))
    return stack(c, with_experts(blocks, moe, sparse_by_type(c, [True] * num_layers_of(c))))


MELLUM = Family(("MellumForCausalLM",), _describe_mellum, RULES + QWEN_RULES, ignored=(r"mtp\..*",))


def _describe_flint(c: ConfigReader) -> Decoder:
    """Flint: Qwen3-MoE with attention sinks, windows and rotations in most layers, and experts that
    sigmoids choose next to a shared one.
    """
    c.supply(mlp_only_layers=[0, 1])
    norm, depth = rms(c, 1e-6, "rms_late_cast"), num_layers_of(c)
    attn = attention(c, usual_dim=128, qk_norm=norm, sinks=True, **biases(c))
    ropes = {"sliding_attention": attn.rope, "full_attention": None}

    def slides(layer: int) -> bool:
        return layer > 1 and layer % 4 != 1 and layer < depth - 1

    blocks = sliding_blocks(c, Block(attn, mlp(c), norm), slides, window_of(c, 513), ropes)
    moe = experts_of(
        c,
        "num_experts",
        score="sigmoid",
        renorm=c.flag("norm_topk_prob", True),
        wide_router=True,
        shared=shared_expert(c, c.integer("shared_expert_intermediate_size", 1024)),
    )
    return stack(c, with_experts(blocks, moe, sparse_by_step(c)))


FLINT = Family(
    ("FlintForCausalLM",),
    _describe_flint,
    (
        rule(LAYER + "self_attn.softmax_offset", "layers.{layer}.attn.sinks"),
        *shared_rules("mlp.shared_expert"),
        *QWEN_RULES,
        *RULES,
    ),
)


def _expert_rule(stored: str, leaf: str, *parts: str) -> Rule:
    """One tensor for all experts; gate and up take turns in its last axis, stored input first."""
    steps: tuple[Step, ...] = ("stacked",) if len(parts) == 1 else ("stacked", "deal")
    if leaf == "weight":
        steps = ("transpose", *steps)
    targets = (f"{_EXPERTS}{part}.{leaf}" for part in parts)
    return rule(f"{LAYER}mlp.experts.{stored}", *targets, steps=steps)


_RULES = (
    rule(LAYER + "self_attn.sinks", "layers.{layer}.attn.sinks"),
    router_rule("mlp.router"),
    _expert_rule("gate_up_proj", "weight", "gate", "up"),
    _expert_rule("gate_up_proj_bias", "bias", "gate", "up"),
    _expert_rule("down_proj", "weight", "down"),
    _expert_rule("down_proj_bias", "bias", "down"),
    *RULES,
)


def _describe_gpt_oss(c: ConfigReader) -> Decoder:
    """gpt-oss, its experts in MXFP4 as published or in bfloat16: attention sinks, windows in every
    other layer, bounded expert gates.
    """
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


GPT_OSS = Family(("GptOssForCausalLM",), _describe_gpt_oss, _RULES)
