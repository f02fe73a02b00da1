"""Qwen 2 to 3.5, dense, with experts and with gated delta nets, and MiMo."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    layer_rules,
    mlp,
    num_layers_of,
    read_kinds,
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
from quire.models.mixers.recurrent.spec import GatedDelta
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp, Moe, Norm


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


_GATE_RULE = rule(LAYER + "mlp.shared_expert_gate.weight", "layers.{layer}.mlp.shared_gate.weight")


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


_MIXER = "layers.{layer}.mixer."
_SHARED_RULES = (
    *layer_rules({"self_attn.q_proj": "attn.q attn.gate"}, step="by_head"),
    *QWEN_RULES,
    *shared_rules("mlp.shared_expert"),
    _GATE_RULE,
    *layer_rules(
        {
            "linear_attn.conv1d": "mixer.q_conv mixer.k_conv mixer.v_conv",
            "linear_attn.norm": "mixer.norm",
            "linear_attn.out_proj": "mixer.out",
        }
    ),
    rule(LAYER + "linear_attn.A_log", _MIXER + "decay_log"),
    rule(LAYER + "linear_attn.dt_bias", _MIXER + "step_bias"),
    *RULES,
)
_SEPARATE = {
    "linear_attn.in_proj_qkv": "mixer.q mixer.k mixer.v",
    "linear_attn.in_proj_z": "mixer.z",
    "linear_attn.in_proj_b": "mixer.b",
    "linear_attn.in_proj_a": "mixer.a",
}
_JOINED = {
    "linear_attn.in_proj_qkvz": "mixer.q mixer.k mixer.v mixer.z",
    "linear_attn.in_proj_ba": "mixer.b mixer.a",
}


def _hybrid(c: ConfigReader, feeds: list[Mlp | Moe]) -> Decoder:
    c.only("attention_bias", False)
    c.only("use_sliding_window", False)
    c.only("attn_output_gate", True)
    c.only("mamba_ssm_dtype", "float32")
    # of layers that predict further tokens, which are left out
    c.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    norm = rms(c, 1e-6, "rms1p")
    attn = attention(
        c,
        usual_dim=256,
        partial=0.25,
        qk_norm=norm,
        gate="full",
    )
    delta = _delta(c, norm)
    pairs = zip(_layer_types(c), feeds, strict=True)
    return stack(
        c, [Block(attn if kind == "full_attention" else delta, feed, norm) for kind, feed in pairs]
    )


def _delta(c: ConfigReader, norm: Norm) -> GatedDelta:
    c.only("hidden_act", "silu")
    key_heads = c.integer("linear_num_key_heads", 16)
    value_heads = c.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        allowed = f"a divisor of linear_num_value_heads={value_heads}"
        raise unsupported("linear_num_key_heads", key_heads, allowed)
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=c.integer("linear_key_head_dim", 128),
        value_dim=c.integer("linear_value_head_dim", 128),
        kernel=c.integer("linear_conv_kernel_dim", 4, minimum=2),
        norm_eps=norm.eps,
    )


def _layer_types(c: ConfigReader) -> list[str]:
    depth, every = num_layers_of(c), c.integer("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    return read_kinds(c, "layer_types", ("linear_attention", "full_attention"), usual)


def _experts(c: ConfigReader, *, renorm: bool) -> Moe:
    shared = shared_expert(c, c.integer("shared_expert_intermediate_size", 512))
    return experts_of(c, "num_experts", renorm=renorm, shared=shared, shared_gate=True)


def _describe_next(c: ConfigReader) -> Decoder:
    """Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts."""
    dense, experts = mlp(c), _experts(c, renorm=c.flag("norm_topk_prob", True))
    return _hybrid(c, [experts if is_sparse else dense for is_sparse in sparse_by_step(c)])


def _describe_dense(c: ConfigReader) -> Decoder:
    """Qwen3.5, text: gated delta nets, and gated attention in every fourth layer."""
    return _hybrid(c, [mlp(c)] * num_layers_of(c))


def _describe_experts(c: ConfigReader) -> Decoder:
    """Qwen3.5 with experts, text: gated delta nets, and gated attention in every fourth layer."""
    c.only("mlp_only_layers", [])
    return _hybrid(c, [_experts(c, renorm=True)] * num_layers_of(c))


_DRAFTS = (r"mtp\..*",)
QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    _describe_next,
    (*layer_rules(_JOINED, step="by_head"), *_SHARED_RULES),
    ignored=_DRAFTS,
)
QWEN3_5 = Family(
    ("Qwen3_5ForCausalLM",),
    _describe_dense,
    (*layer_rules(_SEPARATE), *_SHARED_RULES),
    ignored=_DRAFTS,
)
QWEN3_5_MOE = Family(
    ("Qwen3_5MoeForCausalLM",),
    _describe_experts,
    (*layer_rules(_SEPARATE), *_SHARED_RULES),
    ignored=_DRAFTS,
)
