"""Falcon and Falcon-H1."""

from __future__ import annotations

from typing import Any, Literal

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    rms,
    stack,
    top_rules,
)
from quire.models.families.mamba import MAMBA2_NAMES, mamba2_of_hybrid, mixer_rules
from quire.models.positions import Alibi
from quire.models.rope_config import read_rope
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Block, Decoder, ParallelMixers

_LAYER = "{prefix}h.{layer}."
_RULES = (
    *top_rules("word_embeddings", "ln_f"),
    *layer_rules(
        {"self_attention.query_key_value": "attn.q attn.k attn.v"}, at=_LAYER, step="by_head"
    ),
    *layer_rules(
        {
            "self_attention.dense": "attn.o",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        at=_LAYER,
    ),
)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    names = {"input_layernorm": "attn_pre", "post_attention_layernorm": "mlp_pre"}
    if decoder.blocks[0].parallel == "two_norms":
        names = {"ln_attn": "attn_pre", "ln_mlp": "mlp_pre"}
    return _RULES + layer_rules(names, at=_LAYER)


def _describe_falcon(c: ConfigReader) -> Decoder:
    """Falcon: parallel blocks with one or two layer norms and few key/value heads, or sequential
    ones with linear biases (ALiBi). transformers rounds these biases to bfloat16; here they are
    exact.
    """
    c.rename(
        hidden_size="n_embed",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        num_kv_heads="n_head_kv",
    )
    c.only("apply_residual_connection_post_layernorm", False)
    bias, is_new = c.flag("bias", False), c.flag("new_decoder_architecture", False)
    width = c.integer("ffn_hidden_size", 4 * c.integer("hidden_size"))
    c.only("ff_factor", width // c.integer("hidden_size"))
    block = Block(
        _attention(c, is_new, bias),
        mlp(c, width=width, act_key="activation", act="gelu", gated=False, bias=bias),
        layer_norm(c, "layer_norm_epsilon"),
        parallel=_parallel(c, is_new),
    )
    context = c.integer("max_position_embeddings", 2048)
    return stack(c, block, context=context, tie=c.flag("tie_word_embeddings", True))


def _attention(c: ConfigReader, is_new: bool, bias: bool) -> Attention:
    dim, heads = head_dim_of(c), c.integer("num_attention_heads")
    shared = c.flag("multi_query", True)
    kv_heads = c.integer("num_kv_heads", heads)
    # transformers reads num_kv_heads in the new architecture alone; older files may have any number
    # there
    if not is_new and shared:
        kv_heads = 1
    elif not is_new:
        c.only("num_kv_heads", heads)
    facts: dict[str, Any] = {"kv_heads": kv_heads, "qkv_bias": bias, "o_bias": bias}
    if c.flag("alibi", False):  # the bias is scaled as the scores are
        for key in ("rope_parameters", "rope_scaling", "rope_theta"):
            c.raw(key, None)  # files have them without rotating
        return attention(c, head_dim=dim, rope=None, alibi=Alibi(scale=dim**-0.5), **facts)
    context = c.integer("max_position_embeddings", 2048)
    return attention(c, head_dim=dim, rope=read_rope(c, dim, context=context), **facts)


def _parallel(c: ConfigReader, is_new: bool) -> Literal["no", "two_norms", "one_norm"]:
    """The way in which the parts of a block are joined."""
    if is_new:
        c.only("parallel_attn", True)
        norms = c.integer("num_ln_in_parallel_attn", 2, maximum=2)
        return "two_norms" if norms == 2 else "one_norm"
    c.only("num_ln_in_parallel_attn", 1)
    return "one_norm" if c.flag("parallel_attn", True) else "no"


FALCON = Family(("FalconForCausalLM",), _describe_falcon, _rules, prefix="transformer.")


def _describe_falcon_h1(c: ConfigReader) -> Decoder:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers everywhere.

    Multipliers of a projection's input or output are taken into its weights.
    """
    norm = rms(c, 1e-5)
    is_normed = c.flag("mamba_rms_norm", False)
    mamba = mamba2_of_hybrid(
        c,
        width=c.integer("mamba_d_ssm", 1024),
        norm_eps=norm.eps if is_normed else None,
        gate_first=not c.flag("mamba_norm_before_gate", True),
        out_bias=c.flag("projectors_bias", False),
    )
    c.raw("mamba_expand", None)  # mamba_d_ssm says how wide the mixer is
    c.raw("mlp_expansion_factor", None)  # and intermediate_size the feed-forward part
    c.only("mamba_use_mlp", True)
    mixers = ParallelMixers((mamba, attention(c, **biases(c))))
    block = Block(mixers, mlp(c, bias=c.flag("mlp_bias", False)), norm)
    return stack(
        c,
        block,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=c.number("lm_head_multiplier", 1.0),
        leaf_scales=tuple(_scales(c).items()),
    )


def _scales(c: ConfigReader) -> dict[str, float]:
    """The factors of leaves, by the ends of their names."""
    into_attention = c.number("attention_in_multiplier", 1.0)
    of_keys = c.number("key_multiplier", 1.0)
    into_mamba = c.number("ssm_in_multiplier", 1.0)
    gate, down = _factors(c, "mlp_multipliers", 2)
    scales = {
        "attn.q.weight": into_attention,
        "attn.k.weight": into_attention * of_keys,
        "attn.k.bias": of_keys,
        "attn.v.weight": into_attention,
        "mlp.gate.weight": gate,
        "mlp.gate.bias": gate,
    }
    # the fifth factor is that of steps, which have a leaf of another name
    for part, factor in zip("zxbc", _factors(c, "ssm_multipliers", 5), strict=False):
        scales |= {f"mixer.{part}.weight": into_mamba * factor, f"mixer.{part}.bias": factor}
    step = _factors(c, "ssm_multipliers", 5)[4]
    scales |= {"mixer.step.weight": into_mamba * step, "mixer.step.bias": step}
    for part, factor in (
        ("attn.o", c.number("attention_out_multiplier", 1.0)),
        ("mixer.out", c.number("ssm_out_multiplier", 1.0)),
        ("mlp.down", down),
    ):
        scales |= {f"{part}.weight": factor, f"{part}.bias": factor}
    return scales


def _factors(c: ConfigReader, key: str, count: int) -> list[float]:
    values = c.raw(key, [1.0] * count)
    if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
        raise unsupported(key, values, f"{count} positive numbers")
    return [float(value) for value in values]


FALCON_H1 = Family(
    ("FalconH1ForCausalLM",),
    _describe_falcon_h1,
    (
        *mixer_rules("mamba", MAMBA2_NAMES),
        *layer_rules(
            {
                "pre_ff_layernorm": "mlp_pre",
                **{f"feed_forward.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
            }
        ),
        rule("{prefix}final_layernorm.weight", "norm.weight"),
        *RULES,
    ),
    # it follows from ssm_multipliers, which the weights have taken in
    ignored=(r"layers\.\d+\.mamba\.mup_vector",),
)
