"""Mamba and Mamba-2: Falcon Mamba, Bamba and Jamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ACTIVATIONS,
    LAYER,
    RULES,
    attention,
    biases,
    layer_rules,
    mlp,
    num_experts_of,
    num_layers_of,
    rms,
    stack,
    top_rules,
)
from quire.models.mixers.recurrent.spec import NO_LIMIT, Mamba, Mamba2
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, Mixer, Moe, Norm

CONV_NAMES = {"conv1d": "conv", "out_proj": "out"}
MAMBA_NAMES = {"in_proj": "in", "x_proj": "select", "dt_proj": "step", **CONV_NAMES}
MAMBA2_NAMES = {
    "in_proj": "z mixer.x mixer.b mixer.c mixer.step",
    "norm": "norm",
    **CONV_NAMES,
}
"""Names of the parts of a mixer in checkpoints, and ours."""


def mixer_rules(at: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules of mixers that lie in a layer under `at`."""
    parts = {f"{at}.{stored}": f"mixer.{ours}" for stored, ours in names.items()}
    leaves = {"A_log": "decay_log", "D": "skip", "dt_bias": "step_bias"}
    return layer_rules(parts) + tuple(
        rule(f"{LAYER}{at}.{stored}", f"layers.{{layer}}.mixer.{ours}")
        for stored, ours in leaves.items()
    )


STACK_RULES = (*top_rules("embeddings", "norm_f"), *layer_rules({"norm": "attn_pre"}))


def mamba_decoder(c: ConfigReader, mixer: Mixer, *, tie: bool) -> Decoder:
    """A decoder with one mixer in every layer, and nothing else; `tie` is the family's default."""
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-5))
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=c.integer("hidden_size"),
        blocks=(Block(mixer, None, norm),) * num_layers_of(c),
        final_norm=norm,
        # a state has one size at every length, so nothing ends with a number of positions
        context=None,
        tie=c.flag("tie_word_embeddings", tie),
    )


def mamba(c: ConfigReader) -> Mamba:
    """The mixer of every layer."""
    c.rename(hidden_size="d_model", intermediate_size="d_inner", num_hidden_layers="n_layer")
    c.only("hidden_act", "silu")
    c.only("rms_norm", True)
    c.only("ssm_cfg", {})
    c.raw("pad_vocab_size_multiple", None)  # vocab_size counts the padding
    dim = c.integer("hidden_size")
    return Mamba(
        width=c.integer("intermediate_size", int(c.number("expand", 2.0) * dim)),
        state=c.integer("state_size", 16),
        kernel=c.integer("conv_kernel", 4, minimum=2),
        rank=rank_of(c, dim),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias", False),
    )


def rank_of(c: ConfigReader, dim: int, key: str = "time_step_rank") -> int:
    """Number of values from which the steps of all channels are made."""
    return -(-dim // 16) if c.raw(key, "auto") == "auto" else c.integer(key)


def _describe_mamba(c: ConfigReader) -> Decoder:
    """Mamba: a stack of state-space mixers without feed-forward parts."""
    return mamba_decoder(c, mamba(c), tie=True)


MAMBA_RULES = STACK_RULES + mixer_rules("mixer", MAMBA_NAMES)
MAMBA = Family(("MambaForCausalLM",), _describe_mamba, MAMBA_RULES, prefix="backbone.")


def _describe_falcon_mamba(c: ConfigReader) -> Decoder:
    """FalconMamba: Mamba with a norm without weights over the step's numbers, b and c."""
    mixer = replace(mamba(c), norm_eps=c.number("mixer_rms_eps", 1e-6))
    return mamba_decoder(c, mixer, tie=True)


FALCON_MAMBA = Family(
    ("FalconMambaForCausalLM",), _describe_falcon_mamba, MAMBA_RULES, prefix="backbone."
)


def _describe_mamba2(c: ConfigReader) -> Decoder:
    """Mamba-2: a stack of state-space mixers with heads, without feed-forward parts."""
    c.only("hidden_act", "silu")
    c.only("rms_norm", True)
    c.raw("norm_before_gate", None)  # the gate is first, whatever published files say
    dim, groups = c.integer("hidden_size"), c.integer("n_groups", 8)
    heads, head_dim = c.integer("num_heads", 128), c.integer("head_dim", 64)
    c.only("intermediate_size", heads * head_dim)
    if heads * head_dim != int(c.number("expand", 2.0) * dim):
        raise unsupported("num_heads", heads, f"expand * hidden_size / head_dim={head_dim}")
    # read although unused: files keep the key of Mamba, whose steps have a rank
    rank_of(c, dim)
    least, largest = step_limits(c)
    bias = c.flag("use_bias", False)
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        state=c.integer("state_size", 128),
        groups=divisor_of("n_groups", groups, heads),
        kernel=c.integer("conv_kernel", 4, minimum=2),
        conv_bias=c.flag("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        norm_groups=groups,
        least_step=least,
        largest_step=largest,
    )
    return mamba_decoder(c, mixer, tie=False)


def mamba2_of_hybrid(c: ConfigReader, *, width: int | None = None, **facts: Any) -> Mamba2:
    """The mixer of a hybrid by its `mamba_` keys; `width` None: as `mamba_expand` says."""
    if width is None:
        width = c.integer("mamba_expand", 2) * c.integer("hidden_size")
    c.only("hidden_act", "silu")
    heads = divisor_of("mamba_n_heads", c.integer("mamba_n_heads", 128), width)
    if c.raw("mamba_d_head", "auto") not in ("auto", width // heads):
        allowed = f"auto, or {width} / mamba_n_heads = {width // heads}"
        raise unsupported("mamba_d_head", c.raw("mamba_d_head"), allowed)
    groups = divisor_of("mamba_n_groups", c.integer("mamba_n_groups", 1), heads)
    bias = c.flag("mamba_proj_bias", False)
    least, largest = step_limits(c)
    return Mamba2(
        **{
            "heads": heads,
            "head_dim": width // heads,
            "state": c.integer("mamba_d_state", 256),
            "groups": groups,
            "kernel": c.integer("mamba_d_conv", 4, minimum=2),
            "conv_bias": c.flag("mamba_conv_bias", True),
            "bias": bias,
            "out_bias": bias,
            "norm_groups": groups,
            "least_step": least,
            "largest_step": largest,
            **facts,
        }
    )


def divisor_of(key: str, count: int, whole: int) -> int:
    """`count`, the value of `key`. Raises UnsupportedConfigValue if it does not divide `whole`."""
    if whole % count:
        raise unsupported(key, count, f"a divisor of {whole}")
    return count


def step_limits(c: ConfigReader) -> tuple[float, float]:
    """The least and the largest step of Mamba-2."""
    key = "time_step_limit"
    limits = c.raw(key, (0.0, NO_LIMIT))
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    if not is_pair or not all(_is_limit(limit) for limit in limits) or limits[0] > limits[1]:
        raise unsupported(key, limits, "two numbers, the least step and the largest")
    return float(limits[0]), float(limits[1])


def _is_limit(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


MAMBA2 = Family(
    ("Mamba2ForCausalLM",),
    _describe_mamba2,
    STACK_RULES + mixer_rules("mixer", MAMBA2_NAMES),
    prefix="backbone.",
)


def _describe_bamba(c: ConfigReader) -> Decoder:
    """Bamba: Mamba-2 in most layers, attention with half of each head rotated in the others."""
    c.ignore("z_loss_coefficient")
    norm = rms(c, 1e-5)
    attn = attention(c, partial=0.5, **biases(c))
    attending = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), norm)
    recurrent = replace(attending, mixer=mamba2_of_hybrid(c, norm_eps=norm.eps))
    depth, layers = num_layers_of(c), _attending(c)
    return stack(c, [attending if i in layers else recurrent for i in range(depth)])


def _attending(c: ConfigReader) -> list[int]:
    layers = c.raw("attn_layer_indices", [])
    c.ignore("layer_types", "layers_block_type")  # derived from it
    if not isinstance(layers, list) or not all(i in range(num_layers_of(c)) for i in layers):
        raise unsupported("attn_layer_indices", layers, "a list of layer numbers")
    return layers


BAMBA = Family(
    ("BambaForCausalLM",),
    _describe_bamba,
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
)


_EXPERT = "feed_forward.experts.{expert}."


def _describe_jamba(c: ConfigReader) -> Decoder:
    """Jamba: Mamba, attention without positions in every eighth layer, experts in every second."""
    norm = rms(c, 1e-6)
    attending = Block(attention(c, rope=None), mlp(c), norm)
    recurrent = replace(attending, mixer=_mamba(c, norm))
    attends, is_sparse = _every(c, "attn_layer", 8, 4), _every(c, "expert_layer", 2, 1)
    experts = _experts(c)
    blocks = []
    for i in range(num_layers_of(c)):
        block = attending if attends[i] else recurrent
        blocks.append(replace(block, mlp=experts) if experts and is_sparse[i] else block)
    return stack(c, blocks)


def _mamba(c: ConfigReader, norm: Norm) -> Mamba:
    c.only("hidden_act", "silu")
    c.only("mamba_inner_layernorms", True)
    dim = c.integer("hidden_size")
    return Mamba(
        width=c.integer("mamba_expand", 2) * dim,
        state=c.integer("mamba_d_state", 16),
        kernel=c.integer("mamba_d_conv", 4, minimum=2),
        rank=rank_of(c, dim, "mamba_dt_rank"),
        conv_bias=c.flag("mamba_conv_bias", True),
        bias=c.flag("mamba_proj_bias", False),
        norm_eps=norm.eps,
        norm_weights=True,
    )


def _every(c: ConfigReader, name: str, period: int, offset: int) -> list[bool]:
    period = c.integer(f"{name}_period", period)
    offset = c.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        raise unsupported(f"{name}_offset", offset, f"less than {name}_period={period}")
    return [i % period == offset for i in range(num_layers_of(c))]


def _experts(c: ConfigReader) -> Moe | None:
    """None where every layer is dense."""
    count = num_experts_of(c, "num_experts") if "num_experts" in c else 16
    # its default of 2 also stands in files with a single expert
    top_k = c.integer("num_experts_per_tok", 2, maximum=max(count, 2))
    # transformers makes a dense part of a single expert, which has no router in its files
    if count == 1:
        return None
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    return Moe(count, top_k, c.integer("intermediate_size"), act, renorm=False)


JAMBA = Family(
    ("JambaForCausalLM",),
    _describe_jamba,
    (
        *mixer_rules("mamba", MAMBA_NAMES),
        *layer_rules(
            {
                "mamba.dt_layernorm": "mixer.step_norm",
                "mamba.b_layernorm": "mixer.b_norm",
                "mamba.c_layernorm": "mixer.c_norm",
                "pre_ff_layernorm": "mlp_pre",
                "feed_forward.router": "mlp.router",
                **{
                    f"{at}{part}_proj": f"{ours}{part}"
                    for at, ours in (
                        ("feed_forward.", "mlp."),
                        (_EXPERT, "mlp.experts.{expert}."),
                    )
                    for part in ("gate", "up", "down")
                },
            }
        ),
        rule("{prefix}final_layernorm.weight", "norm.weight"),
        *RULES,
    ),
)
