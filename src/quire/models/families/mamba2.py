"""Mamba-2: a stack of state-space mixers with heads, without feed-forward parts."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.mamba import MAMBA2_NAMES, RULES, mamba_decoder, mixer_rules, rank_of
from quire.models.mixers.recurrent.spec import NO_LIMIT, Mamba2
from quire.models.rules import Family
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
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
    """The mixer of a model that has others too, from its keys `mamba_...`; `width` None: as many
    channels as `mamba_expand` says.
    """
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


FAMILY = Family(
    ("Mamba2ForCausalLM",),
    _describe,
    RULES + mixer_rules("mixer", MAMBA2_NAMES),
    prefix="backbone.",
)
