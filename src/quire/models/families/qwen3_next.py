"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    layer_rules,
    mlp,
    num_layers_of,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    shared_expert,
    shared_rules,
    sparse_by_step,
)
from quire.models.mixers.recurrent.spec import GatedDelta
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp, Moe, Norm

_MIXER = "layers.{layer}.mixer."
_SHARED_RULES = (
    *layer_rules({"self_attn.q_proj": "attn.q attn.gate"}, step="by_head"),
    *QWEN_RULES,
    *shared_rules("mlp.shared_expert"),
    rule(LAYER + "mlp.shared_expert_gate.weight", "layers.{layer}.mlp.shared_gate.weight"),
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
    dense, experts = mlp(c), _experts(c, renorm=c.flag("norm_topk_prob", True))
    return _hybrid(c, [experts if is_sparse else dense for is_sparse in sparse_by_step(c)])


def _describe_dense(c: ConfigReader) -> Decoder:
    return _hybrid(c, [mlp(c)] * num_layers_of(c))


def _describe_experts(c: ConfigReader) -> Decoder:
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
