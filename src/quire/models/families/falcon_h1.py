"""Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers everywhere.

Multipliers of a projection's input or output are taken into its weights.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.families.llama import RULES, attention, biases, layer_rules, mlp, rms, stack
from quire.models.families.mamba import MAMBA2_NAMES, mamba2_of_hybrid, mixer_rules
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, ParallelMixers


def _describe(c: ConfigReader) -> Decoder:
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


FAMILY = Family(
    ("FalconH1ForCausalLM",),
    _describe,
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
