"""LFM3: LFM2 with norms after the parts, one gate for each head, and windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.lfm2 import RULES as LFM2_RULES
from quire.models.families.llama import (
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    num_layers_of,
    read_kinds,
    stack,
    window_of,
)
from quire.models.mixers.recurrent.spec import ShortConv
from quire.models.positions import ProportionalScaling, Rope
from quire.models.rope_config import SCALINGS, rope_from
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

_ROTATED = ("full_attention", "sliding_attention")


def _describe(c: ConfigReader) -> Decoder:
    norm = Norm("rms", c.number("norm_eps", 1e-5))
    has_gate = c.flag("use_attention_gate", True)
    full = attention(
        c,
        usual_dim=128,
        rope=None,
        qk_norm=norm,
        gate="per_head" if has_gate else "none",
        **biases(c),
    )
    ropes = _ropes(c)
    conv = ShortConv(
        c.integer("hidden_size"),
        c.integer("conv_L_cache", 7, minimum=2),
        c.flag("conv_bias", False),
    )
    mixers: dict[str, Attention | ShortConv] = {
        "full_attention": replace(full, rope=ropes["full_attention"]),
        "sliding_attention": replace(
            full, rope=ropes["sliding_attention"], window=window_of(c, 256)
        ),
        "conv": conv,
    }
    block = Block(
        conv,
        Mlp(c.integer("intermediate_size", 7680)),
        norm,
        post=c.flag("use_sandwich_norm", True),
    )
    blocks = [replace(block, mixer=mixers[kind]) for kind in _layer_types(c)]
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True))


def _layer_types(c: ConfigReader) -> list[str]:
    depth = num_layers_of(c)
    by_turn = ("sliding_attention", "conv", "full_attention", "conv")
    usual = ["conv" if i == 0 else by_turn[i % 4] for i in range(depth)]
    return read_kinds(c, "layer_types", (*_ROTATED, "conv"), usual)


def _ropes(c: ConfigReader) -> dict[str, Rope]:
    dim = head_dim_of(c, 128)
    section = c.section("rope_parameters")
    if section is None:
        full = Rope(1e6, dim, ProportionalScaling(dim // 4))
        return {"full_attention": full, "sliding_attention": Rope(1e4, dim)}
    kinds, context = (*SCALINGS, "proportional"), context_of(c)
    sections = {kind: section.section(kind) for kind in _ROTATED}
    return {
        kind: rope_from(found, dim, 1e4, 1.0, context, kinds, None)
        for kind, found in sections.items()
    }


FAMILY = Family(
    ("Lfm3ForCausalLM",),
    _describe,
    (
        *layer_rules(
            {
                "post_operator_norm": "attn_post",
                "post_ffn_norm": "mlp_post",
                "self_attn.g_proj": "attn.gate",
                "self_attn.o_proj": "attn.o",
                **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
            }
        ),
        *LFM2_RULES,
    ),
    other_ends=(("self_attn.g_proj.weight", "self_attn.gate_proj.weight"),),
)
