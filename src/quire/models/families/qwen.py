"""Qwen2 and Qwen3, dense and with experts, and MiMo."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    mlp,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    router_rule,
    shared_expert,
    shared_rules,
    sparse_by_step,
    with_experts,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder


def qwen_layers(c: ConfigReader, block: Block) -> list[Block]:
    """Blocks by `layer_types`, or windows from `max_window_layers` on if switched on."""
    c.only("use_mrope", False)
    if not c.flag("is_causal", True):
        c.only("use_sliding_window", False)
    window, first = window_of(c, 4096), c.integer("max_window_layers", 28, minimum=0)
    window = window if c.flag("use_sliding_window", False) else None
    return sliding_blocks(c, block, lambda i: window is not None and i >= first, window)


def _describe_qwen2(c: ConfigReader) -> Decoder:
    """Qwen2 and 2.5: Llama with biases on q, k and v, and windows in later layers if on."""
    attn = attention(c, qkv_bias=True, is_causal=c.flag("is_causal", True))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), rms(c, 1e-6))))


QWEN2 = Family(("Qwen2ForCausalLM",), _describe_qwen2, RULES)


def _describe_qwen3(c: ConfigReader) -> Decoder:
    """Qwen3: Llama with a norm over each query and key head."""
    norm, is_causal = rms(c, 1e-6), c.flag("is_causal", True)
    attn = attention(c, usual_dim=128, qk_norm=norm, is_causal=is_causal, **biases(c))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), norm)))


QWEN3 = Family(("Qwen3ForCausalLM",), _describe_qwen3, RULES)


_GATE_RULE = rule(
    "{prefix}layers.{layer}.mlp.shared_expert_gate.weight",
    "layers.{layer}.mlp.shared_gate.weight",
)


def _describe_qwen2_moe(c: ConfigReader) -> Decoder:
    """Qwen2-MoE: Qwen2's attention, experts in some layers, a shared expert with a gate."""
    attn = attention(c, qkv_bias=c.flag("qkv_bias", True))
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    moe = experts_of(
        c,
        "num_experts",
        renorm=c.flag("norm_topk_prob", False),
        shared=shared_expert(c, c.integer("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    return stack(c, with_experts(_windows(c, dense), moe, sparse_by_step(c)))


def _windows(c: ConfigReader, block: Block) -> list[Block]:
    """The block for each layer type; without `layer_types` every other layer below
    `max_window_layers` has a window, if `use_sliding_window`.
    """
    c.only("use_mrope", False)
    window, below = window_of(c, 4096), c.integer("max_window_layers", 28, minimum=0)
    window = window if c.flag("use_sliding_window", False) else None
    slides = range(0, 0 if window is None else below, 2)
    return sliding_blocks(c, block, lambda layer: layer in slides, window)


QWEN2_MOE = Family(
    ("Qwen2MoeForCausalLM",),
    _describe_qwen2_moe,
    RULES + QWEN_RULES + shared_rules("mlp.shared_expert") + (_GATE_RULE,),
)


def _describe_qwen3_moe(c: ConfigReader) -> Decoder:
    """Qwen3 mixture of experts: Qwen3's attention, experts in the layers that the config says."""
    return _with_weights(c, renorm=c.flag("norm_topk_prob", False))


def _describe_in_vl(c: ConfigReader) -> Decoder:
    """The text of Qwen3-VL with experts."""
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

QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), _describe_qwen3_moe, RULES + QWEN_RULES)
QWEN3_MOE_IN_VL = Family(
    ("Qwen3VLMoeTextModel",), _describe_in_vl, RULES + _STACKED_RULES, turns_by_shape=True
)
"""Qwen3-MoE in Qwen3-VL, whose files have all experts of a layer in one tensor; those of
transformers 5 as the products take them.
"""


def _describe_mimo(c: ConfigReader) -> Decoder:
    """MiMo: Qwen2, and layers that predict further tokens, which are left out."""
    c.raw("num_nextn_predict_layers", None)
    attn = attention(c, qkv_bias=c.flag("attention_bias", True))
    return stack(c, qwen_layers(c, Block(attn, mlp(c), rms(c, 1e-6))))


MIMO = Family(("MiMoForCausalLM",), _describe_mimo, RULES, ignored=(r"mtp_layers\..*",))
