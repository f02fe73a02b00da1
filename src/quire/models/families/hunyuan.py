"""Hunyuan: the dense models, A13B and V3."""

from __future__ import annotations

from quire.models.config_reader import LARGEST_SIZE, ConfigReader, unsupported
from quire.models.families.llama import (
    ACTIVATIONS,
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    mlp,
    most_experts,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    expert_rules,
    experts_of,
    router_rule,
    select_bias_rule,
    shared_expert,
    shared_rules,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.positions import Rope
from quire.models.rope_config import read_rope
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Moe

HUNYUAN_RULES = (
    *layer_rules(
        {"self_attn.query_layernorm": "attn.q_norm", "self_attn.key_layernorm": "attn.k_norm"}
    ),
    *RULES,
)


def hunyuan_attention(c: ConfigReader) -> Attention:
    """The attention of the dense models and of the mixtures."""
    c.only("use_qk_norm", True)
    c.only("use_rotary_pos_emb", True)
    c.only("use_cla", False)
    dim = head_dim_of(c)
    c.only("attention_head_dim", dim)
    return attention(
        c,
        head_dim=dim,
        rope=_rope(c, dim),
        qk_norm=rms(c, 1e-5),
        qk_norm_after_rope=True,
        **biases(c),
    )


def _rope(c: ConfigReader, dim: int) -> Rope:
    """Files call a base that `alpha` has stretched once and for all a dynamic scaling."""
    old = c.section("rope_scaling")
    section = old if old is not None else c.section("rope_parameters")
    if section is None or "alpha" not in section:
        return read_rope(c, dim, context=context_of(c))
    section.only("type", "dynamic")
    section.only("rope_type", "dynamic")
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        section.raw(key, None)  # without meaning next to alpha, as in transformers
    theta = section.number("rope_theta", c.number("rope_theta", 1e4))
    # the exponent with which the slowest frequency is divided by alpha and the fastest stays
    theta *= section.number("alpha") ** (dim / (dim - 2))
    return Rope(theta, dim)


def check_original_keys(c: ConfigReader) -> None:
    """Keys of the published files that say what the family is, or nothing about its decoder."""
    c.only("norm_type", "hf_rms", "rms")
    c.only("mlp_bias", False)
    c.only("position_embedding_xdrope", False)
    c.only("add_classification_head", False)
    c.only("cla_share_factor", 1, 2)  # of attention shared between layers, which is off
    # of the classification head, and of training
    c.ignore("class_num", "pool_type", "dense_list", "enable_lm_head_fp32", "org_vocab_size")
    marks = ("pad_id", "mask_init_id", "im_start_id", "im_end_id", "im_newline_id")
    c.ignore(*marks, "text_start_id", "text_end_id")


def _describe_hunyuan(c: ConfigReader) -> Decoder:
    """Hunyuan, dense: Llama with norms over each query and key head after their rotation."""
    check_original_keys(c)
    return stack(c, Block(hunyuan_attention(c), mlp(c), rms(c, 1e-5)))


HUNYUAN = Family(("HunYuanDenseV1ForCausalLM",), _describe_hunyuan, HUNYUAN_RULES)


HUNYUAN_MOE_RULES = (
    *HUNYUAN_RULES,
    router_rule("mlp.gate.wg"),
    *expert_rules("mlp.experts"),
    *shared_rules("mlp.shared_mlp"),
)


def _describe_hunyuan_moe(c: ConfigReader) -> Decoder:
    """Hunyuan-A13B: Hunyuan's attention, experts in every layer and a shared one."""
    check_original_keys(c)
    c.only("use_mixed_mlp_moe", True)
    c.only("moe_layer_num_skipped", 0)
    c.only("use_mla", False)
    c.only("group_limited_greedy", False)
    c.only("norm_topk_prob", True)
    c.only("routed_scaling_factor", False, 1.0)
    # of training
    c.ignore("moe_drop_tokens", "moe_random_routing_dropped_token", "num_media_embeds")
    return stack(c, Block(hunyuan_attention(c), _hunyuan_moe_experts(c), rms(c, 1e-5)))


def _hunyuan_moe_experts(c: ConfigReader) -> Moe:
    experts = _in_all_layers(c, "num_experts", maximum=most_experts(c))
    width = c.integer("intermediate_size")
    num_shared = _in_all_layers(c, "num_shared_expert", 1)
    return Moe(
        experts=experts,
        top_k=_in_all_layers(c, "moe_topk", 1, maximum=experts),
        width=_in_all_layers(c, "moe_intermediate_size", width),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
        wide_router=True,
        shared=shared_expert(c, width * num_shared),
    )


def _in_all_layers(
    c: ConfigReader, key: str, default: int | None = None, maximum: int = LARGEST_SIZE
) -> int:
    """A whole number, or a list that has the same one for every layer."""
    value = c.raw(key) if default is None else c.raw(key, default)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        allowed = f"an integer from 1 to {maximum}, the same for every layer"
        raise unsupported(key, value, allowed)
    return value


HUNYUAN_MOE = Family(("HunYuanMoEV1ForCausalLM",), _describe_hunyuan_moe, HUNYUAN_MOE_RULES)


_RULES = (
    router_rule("mlp.router.gate"),
    select_bias_rule("mlp.expert_bias"),
    *expert_rules("mlp.experts"),
    *shared_rules("mlp.shared_mlp"),
)


def _describe_hy_v3(c: ConfigReader) -> Decoder:
    """Hunyuan V3: Qwen3's attention, experts chosen by sigmoids and a bias, a shared expert."""
    norm = rms(c, 1e-5)
    c.only("qk_norm", True)
    c.only("mlp_bias", False)
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    attn = attention(c, usual_dim=128, theta=11_158_840.0, qk_norm=norm, **biases(c))
    dense = Block(attn, mlp(c), norm)
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(dense, _hy_v3_experts(c), sparse))


def _hy_v3_experts(c: ConfigReader) -> Moe:
    c.only("route_norm", True)
    c.only("moe_router_use_sigmoid", True)
    c.only("moe_router_enable_expert_bias", True)
    c.raw("enable_moe_fp32_combine", None)  # one rounding of a sum of two rounded numbers
    width = c.integer("moe_intermediate_size")
    num_shared = c.integer("num_shared_experts", 1)
    return experts_of(
        c,
        "num_experts",
        score="sigmoid",
        scale=c.number("router_scaling_factor", 2.826),
        select_bias=True,
        wide_router=True,
        shared=shared_expert(c, width * num_shared),
    )


HY_V3 = Family(("HYV3ForCausalLM",), _describe_hy_v3, RULES + _RULES, drafts_after_layers=True)
