"""Kimi Linear and Ling 3 (Bailing hybrid): delta attention with a decay for each channel, latent
attention in every fourth or sixth layer, and DeepSeek's experts.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.deepseek import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import (
    LAYER,
    layer_rules,
    mlp,
    num_layers_of,
    read_kinds,
    rms,
    stack,
    top_rules,
)
from quire.models.families.mixtures import (
    deepseek_experts_of,
    expert_rules,
    router_rule,
    select_bias_rule,
    shared_rules,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.mixers.recurrent.spec import ChannelDelta
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, LatentAttention, Norm

_FULL, _LINEAR = "full_attention", "linear_attention"
_RENAMED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
"""The name of a key in other files -> its name in Kimi's."""


def _describe_kimi(c: ConfigReader) -> Decoder:
    c.rename(**_RENAMED)
    c.rename(n_routed_experts="num_local_experts")
    c.only("mla_use_nope", True)
    c.ignore("head_dim")  # both mixers have sizes of their own
    c.ignore("use_grouped_topk")  # groups are what it says with one group, and the keys with more
    c.only("num_nextn_predict_layers", 0)
    attn = replace(latent_attention(c, without_rope=True), norm=Norm("rms", 1e-6))
    section = c.section("linear_attn_config")
    part = c if section is None else section
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if section is not None:
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, dim, kernel = names
    delta = ChannelDelta(
        heads=part.integer(heads, 32),
        head_dim=(width := part.integer(dim, 128)),
        kernel=part.integer(kernel, 4, minimum=2),
        norm_eps=c.number("rms_norm_eps", 1e-5),
        rank=width,
    )
    usual = _listed_types(c, section)
    return _stack(c, attn, delta, usual, eps=1e-5, dense=1)


def _listed_types(c: ConfigReader, section: ConfigReader | None) -> list[str]:
    """The layers as published files list them, from number 1 on; or every fourth but the first."""
    depth = num_layers_of(c)
    if section is None:
        return [_FULL if i and i % 4 == 0 else _LINEAR for i in range(depth)]
    full = section.raw("full_attn_layers", [])
    linear = section.raw("kda_layers", [])
    if sorted([*full, *linear]) != list(range(1, depth + 1)):
        allowed = f"each layer from 1 to {depth} in one of the lists"
        raise unsupported("linear_attn_config.full_attn_layers", full, allowed)
    return [_FULL if i + 1 in full else _LINEAR for i in range(depth)]


def _describe_bailing(c: ConfigReader) -> Decoder:
    c.rename(
        max_position_embeddings="model_max_length",
        norm_topk_prob="moe_renormalize",
        n_group="num_expert_group",
        n_routed_experts="num_local_experts",
        num_experts_per_tok="num_experts_per_token",
        n_shared_experts="num_shared_experts",
    )
    c.rename(n_routed_experts="num_experts")
    for key in ("n_group", "topk_group"):
        c.integer(key)
    c.integer("num_nextn_predict_layers", None, minimum=0)
    c.integer("num_mtp_layers", None, minimum=0)
    attn = replace(latent_attention(c, interleaved=True, theta=6e6, head_dim_key=None), gate=True)
    depth, every = num_layers_of(c), c.integer("layer_group_size", 6)
    bound = c.raw("kda_lower_bound", -5.0)
    if not isinstance(bound, float | int) or bound >= 0:
        raise unsupported("kda_lower_bound", bound, "a number below 0")
    delta = ChannelDelta(
        heads=attn.heads,
        head_dim=c.integer("linear_head_dim", c.integer("head_dim", 128)),
        kernel=c.integer("short_conv_kernel_size", 4, minimum=2),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        bound=float(bound) if c.flag("kda_safe_gate", True) else None,
    )
    c.only("linear_num_heads", delta.heads)  # as transformers says it again
    c.only("linear_conv_kernel_dim", delta.kernel)
    usual = [_LINEAR if (i + 1) % every else _FULL for i in range(depth)]
    return _stack(c, attn, delta, usual, eps=1e-6, dense=2)


def _stack(
    c: ConfigReader,
    attn: LatentAttention,
    delta: ChannelDelta,
    usual: list[str],
    *,
    eps: float,
    dense: int,
) -> Decoder:
    feed, norm = mlp(c), rms(c, eps)
    kinds = read_kinds(c, "layer_types", (_FULL, _LINEAR), usual)
    blocks = [Block(attn if kind == _FULL else delta, feed, norm) for kind in kinds]
    sparse = sparse_by_type(c, sparse_after(c, dense=dense))
    return stack(c, with_experts(blocks, deepseek_experts_of(c), sparse))


def _delta_rules(at: str, out: str, **others: str) -> tuple[Rule, ...]:
    """The rules of delta attention, whose tensors are below `at` of a layer."""
    parts = {f"{part}_proj": f"mixer.{part}" for part in "qkvb"}
    parts |= {f"{part}_conv1d": f"mixer.{part}_conv" for part in "qkv"}
    parts |= {"o_norm": "mixer.norm", out: "mixer.out", **others}
    return (
        *layer_rules({f"{at}.{stored}": ours for stored, ours in parts.items()}),
        rule(f"{LAYER}{at}.dt_bias", "layers.{layer}.mixer.step_bias"),
    )


def _kimi_rules(decoder: Decoder) -> tuple[Rule, ...]:
    return (
        *_delta_rules(
            "self_attn",
            "o_proj",
            f_a_proj="mixer.a_down",
            f_b_proj="mixer.a",
            g_a_proj="mixer.z_down",
            g_b_proj="mixer.z",
        ),
        rule(LAYER + "self_attn.A_log", "layers.{layer}.mixer.decay_log", steps=("boxed",)),
        router_rule("block_sparse_moe.gate"),
        select_bias_rule("block_sparse_moe.gate.e_score_correction_bias"),
        *expert_rules("block_sparse_moe.experts", ("w1", "w3", "w2")),
        *shared_rules("block_sparse_moe.shared_experts"),
        *RULES,
    )


KIMI_LINEAR = Family(
    ("KimiLinearForCausalLM",),
    _describe_kimi,
    _kimi_rules,
    other_ends=tuple(
        (f".mlp.{part}_proj.weight", f".block_sparse_moe.{part}_proj.weight")
        for part in ("gate", "up", "down")
    ),  # of dense layers in files that transformers has written
)
BAILING_HYBRID = Family(
    ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
    _describe_bailing,
    (
        *top_rules("word_embeddings", "norm"),
        *_delta_rules("attention", "dense", f_proj="mixer.a", g_proj="mixer.z"),
        rule(LAYER + "attention.A_log", "layers.{layer}.mixer.decay_log"),
        *layer_rules({"attention.g_proj": "attn.gate", "attention.dense": "attn.o"}),
        select_bias_rule("mlp.gate.expert_bias"),
        *(
            replace(each, source=each.source.replace(".self_attn.", ".attention."))
            for each in RULES
        ),
    ),
    drafts_after_layers=True,
)
