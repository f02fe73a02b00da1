"""Jamba: Mamba, attention without positions in every eighth layer, experts in every second."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ACTIVATIONS,
    RULES,
    attention,
    layer_rules,
    mlp,
    num_experts_of,
    num_layers_of,
    rms,
    stack,
)
from quire.models.families.mamba import MAMBA_NAMES, mixer_rules
from quire.models.mixers.recurrent.spec import Mamba
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Moe, Norm

_EXPERT = "feed_forward.experts.{expert}."


def _describe(c: ConfigReader) -> Decoder:
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
    rank = c.raw("mamba_dt_rank", "auto")
    return Mamba(
        width=c.integer("mamba_expand", 2) * dim,
        state=c.integer("mamba_d_state", 16),
        kernel=c.integer("mamba_d_conv", 4, minimum=2),
        rank=-(-dim // 16) if rank == "auto" else c.integer("mamba_dt_rank"),
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


FAMILY = Family(
    ("JambaForCausalLM",),
    _describe,
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
