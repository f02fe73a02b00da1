"""LFM2 and LFM3."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    EMBEDDING_RULES,
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
from quire.models.families.mixtures import expert_rules, experts_of, router_rule, select_bias_rule
from quire.models.mixers.recurrent.spec import ShortConv
from quire.models.positions import ProportionalScaling, Rope
from quire.models.rope_config import SCALINGS, rope_from
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe, Norm

_STORED, _OURS = "{prefix}layers.{layer}.", "layers.{layer}."
_NAMES = {
    "operator_norm": "attn_pre",
    "ffn_norm": "mlp_pre",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.out_proj": "attn.o",
    "self_attn.q_layernorm": "attn.q_norm",
    "self_attn.k_layernorm": "attn.k_norm",
    "conv.in_proj": "mixer.in",
    "conv.conv": "mixer.conv",
    "conv.out_proj": "mixer.out",
    "feed_forward.w1": "mlp.gate",
    "feed_forward.w3": "mlp.up",
    "feed_forward.w2": "mlp.down",
}
RULES = (
    rule("{prefix}embedding_norm.weight", "norm.weight"),
    *EMBEDDING_RULES,
    *(
        rule(f"{_STORED}{stored}.{{leaf}}", f"{_OURS}{ours}.{{leaf}}")
        for stored, ours in _NAMES.items()
    ),
)


def _describe_lfm2(c: ConfigReader) -> Decoder:
    """LFM2: gated short convolutions, and attention in some layers."""
    _check_old_keys(c)
    return _hybrid(c, [_mlp(c)] * num_layers_of(c))


def _describe_experts(c: ConfigReader) -> Decoder:
    """LFM2 with experts after dense layers."""
    depth = num_layers_of(c)
    num_dense = c.integer("num_dense_layers", 2, minimum=0, maximum=depth)
    dense, experts = Mlp(c.integer("intermediate_size", 7168)), _experts(c)
    return _hybrid(c, [dense] * num_dense + [experts] * (depth - num_dense))


def _experts(c: ConfigReader) -> Moe:
    return experts_of(
        c,
        "num_experts",
        score="sigmoid",
        renorm=c.flag("norm_topk_prob", True),
        renorm_eps=1e-6,
        scale=c.number("routed_scaling_factor", 1.0),
        select_bias=c.flag("use_expert_bias", True),
    )


def _hybrid(c: ConfigReader, feeds: list[Mlp | Moe]) -> Decoder:
    norm = _norm(c)
    full = Block(attention(c, theta=1e6, qk_norm=norm), None, norm)
    conv = ShortConv(
        width=c.integer("hidden_size"),
        kernel=c.integer("conv_L_cache", 3, minimum=2),
        bias=c.flag("conv_bias", False),
    )
    mixers = {"full_attention": full, "conv": replace(full, mixer=conv)}
    pairs = zip(_lfm2_layer_types(c), feeds, strict=True)
    blocks = [replace(mixers[kind], mlp=feed) for kind, feed in pairs]
    # the first files call the key tie_embedding
    return stack(c, blocks, tie=c.flag("tie_embedding", c.flag("tie_word_embeddings", True)))


def _norm(c: ConfigReader) -> Norm:
    return Norm("rms", c.number("norm_eps", 1e-5))


def _check_old_keys(c: ConfigReader) -> None:
    """Refuse what other keys contradict, or what no published model has."""
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        c.only(key, c.integer("hidden_size"))
    c.only("num_heads", c.integer("num_attention_heads"))
    c.only("block_norm_eps", _norm(c).eps)
    c.only("theta", c.number("rope_theta", 1e6))
    c.only("block_use_swiglu", True)
    c.only("use_pos_enc", True)


def _lfm2_layer_types(c: ConfigReader) -> list[str]:
    """`layer_types`, or in old files the numbers of the layers with attention."""
    depth = num_layers_of(c)
    attending = c.raw("full_attn_idxs", list(range(depth)))
    if not isinstance(attending, list):
        raise unsupported("full_attn_idxs", attending, "a list of layer numbers")
    usual = ["full_attention" if i in attending else "conv" for i in range(depth)]
    return read_kinds(c, "layer_types", ("full_attention", "conv"), usual)


def _mlp(c: ConfigReader) -> Mlp:
    """The width may be two thirds of what the config says, times a factor, rounded up."""
    width = c.integer("block_ff_dim", c.integer("intermediate_size", 12288))
    unit = c.integer("block_multiple_of", 256)
    factor = c.number("block_ffn_dim_multiplier", 1.0)
    if c.flag("block_auto_adjust_ff_dim", True):
        # cut to a whole number twice, as transformers does it: one cut may end in another multiple
        width = -(-int(factor * int(2 * width / 3)) // unit) * unit
    return Mlp(width)


LFM2 = Family(("Lfm2ForCausalLM",), _describe_lfm2, RULES)
MOE = Family(
    ("Lfm2MoeForCausalLM",),
    _describe_experts,
    (
        router_rule("feed_forward.gate"),
        select_bias_rule("feed_forward.expert_bias"),
        *expert_rules("feed_forward.experts", ("w1", "w3", "w2")),
        *RULES,
    ),
)


_ROTATED = ("full_attention", "sliding_attention")


def _describe_lfm3(c: ConfigReader) -> Decoder:
    """LFM3: LFM2 with norms after the parts, one gate for each head, and windows in some layers."""
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
    blocks = [replace(block, mixer=mixers[kind]) for kind in _lfm3_layer_types(c)]
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True))


def _lfm3_layer_types(c: ConfigReader) -> list[str]:
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


LFM3 = Family(
    ("Lfm3ForCausalLM",),
    _describe_lfm3,
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
        *RULES,
    ),
    other_ends=(("self_attn.g_proj.weight", "self_attn.gate_proj.weight"),),
)
