"""Nemotron-H: layers of Mamba-2, attention without positions, a feed-forward part or experts."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, attention, context_of, layer_rules
from quire.models.families.mamba import MAMBA2_NAMES, STACK_RULES, divisor_of, mixer_rules
from quire.models.families.mixtures import (
    deepseek_experts_of,
    expert_rules,
    router_rule,
    select_bias_rule,
    shared_rules,
)
from quire.models.mixers.recurrent.spec import NO_LIMIT, Mamba2
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Mlp, Moe, Norm

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Types of layers as published files and transformers before 5.14 name them."""
_UNUSED = (
    "time_step_limit expand mtp_layers_block_type num_nextn_predict_layers time_step_rank "
    "mtp_hybrid_override_pattern moe_shared_expert_overlap rope_theta partial_rotary_factor"
)
"""Keys of mixers of other families, of attention that rotates, and of layers that only draft."""
_EXPERTS = (
    "n_routed_experts num_local_experts n_shared_experts moe_intermediate_size num_experts_per_tok "
    "moe_shared_expert_intermediate_size n_group routed_scaling_factor topk_group norm_topk_prob"
)
"""Keys of layers with experts."""


def _describe(c: ConfigReader) -> Decoder:
    for key in _UNUSED.split():
        c.raw(key, None)
    c.only("sliding_window", None)
    c.rename(head_dim="attention_head_dim", num_key_value_heads="num_query_groups")
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-5))
    for key in ("rms_norm_eps", "norm_eps"):
        c.only(key, norm.eps)
    c.only("attention_bias", False)
    act = c.choice("mlp_hidden_act", ACTIVATIONS, "relu2")
    bias = c.flag("mlp_bias", False)
    feed = Mlp(c.integer("intermediate_size", 21504), act, gated=False, bias=bias)
    attn = attention(c, head_dim=c.integer("head_dim", 128), rope=None)
    blocks = {
        "linear_attention": Block(_mamba(c, norm), None, norm),
        "full_attention": Block(attn, None, norm),
        "mlp": Block(None, feed, norm),
    }
    kinds = _layer_types(c)
    # dense files may have keys of experts with values that no mixture could have
    if "moe" in kinds:
        blocks["moe"] = Block(None, _experts(c, feed), norm)
    for key in (*_EXPERTS.split(), "moe_latent_size"):
        c.raw(key, None)
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=c.integer("hidden_size"),
        blocks=tuple(blocks[kind] for kind in kinds),
        final_norm=norm,
        context=context_of(c),
        tie=c.flag("tie_word_embeddings", False),
    )


def _experts(c: ConfigReader, feed: Mlp) -> Moe:
    c.only("n_shared_experts", 1)
    shared = replace(feed, width=c.integer("moe_shared_expert_intermediate_size", 7688))
    latent = c.integer("moe_latent_size", None)
    if latent is not None:
        c.only("mlp_bias", False)  # whose products would have one, too
    moe = deepseek_experts_of(c, gated=False, latent=latent)
    return replace(moe, act=feed.act, shared=shared)


def _mamba(c: ConfigReader, norm: Norm) -> Mamba2:
    c.only("mamba_hidden_act", "silu")
    heads, bias = c.integer("mamba_num_heads", 128), c.flag("use_bias", False)
    c.only("mamba_proj_bias", bias)
    groups = divisor_of("n_groups", c.integer("n_groups", 8), heads)
    return Mamba2(
        heads=heads,
        head_dim=c.integer("mamba_head_dim", 64),
        state=c.integer("ssm_state_size", 128),
        groups=groups,
        kernel=c.integer("conv_kernel", 4, minimum=2),
        conv_bias=c.flag("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm_eps=norm.eps,
        norm_groups=groups,
        least_step=c.number("time_step_min", 0.001),
        largest_step=NO_LIMIT,
    )


def _layer_types(c: ConfigReader) -> list[str]:
    known = _LETTERS.values()
    pattern = c.raw("hybrid_override_pattern", None)
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
            raise unsupported("hybrid_override_pattern", pattern, f"letters {''.join(_LETTERS)}")
        pattern = [_LETTERS[letter] for letter in pattern]
    kinds = c.raw("layers_block_type", c.raw("layer_types", pattern))
    if not isinstance(kinds, list) or not kinds:
        raise unsupported("layers_block_type", kinds, "a list with one type per layer")
    kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds if isinstance(kind, str)]
    c.supply(num_hidden_layers=len(kinds))
    c.only("num_hidden_layers", len(kinds))
    for kind in kinds:
        if kind not in known:
            raise unsupported("layers_block_type", kind, ", ".join(sorted(known)))
    return kinds


FAMILY = Family(
    ("NemotronHForCausalLM",),
    _describe,
    (
        *mixer_rules("mixer", MAMBA2_NAMES),
        router_rule("mixer.gate"),
        select_bias_rule("mixer.gate.e_score_correction_bias"),
        *expert_rules("mixer.experts"),
        *shared_rules("mixer.shared_experts"),
        *layer_rules(
            {
                "norm": "mlp_pre",
                "mixer.fc1_latent_proj": "mlp.latent_in",
                "mixer.fc2_latent_proj": "mlp.latent_out",
                **{f"mixer.{part}_proj": f"attn.{part}" for part in "qkvo"},
                **{f"mixer.{part}_proj": f"mlp.{part}" for part in ("up", "down")},
            }
        ),
        *STACK_RULES,
    ),
    prefix="backbone.",
    ignored=(r"mtp\..*",),
)
