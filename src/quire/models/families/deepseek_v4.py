"""DeepSeek-V4: attention to a window and to compressed entries of what is before it, several
residual streams that each part mixes, experts that the first layers look up by the token's id.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    context_of,
    layer_rules,
    num_layers_of,
    read_kinds,
    rms,
    stack,
    top_rules,
)
from quire.models.families.mixtures import expert_rules, experts_of, router_rule, select_bias_rule
from quire.models.mixers.compressed.spec import CompressedAttention, Compression, EntryIndexer
from quire.models.positions import Rope, YarnScaling
from quire.models.rope_config import only_section, rope_from
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, HyperStreams, Mlp, Moe

_PROJECTIONS = ("w1", "w3", "w2")
_OURS = "layers.{layer}."
_LAYER = "{prefix}layers.{layer}."


def _of_streams(stored: str, ours: str) -> tuple[Rule, ...]:
    parts = {"fn": "weight", "base": "base", "scale": "scale"}
    return tuple(rule(f"{stored}{name}", f"{ours}{part}") for name, part in parts.items())


_RULES = (
    *top_rules("embed_tokens", "norm", "head"),
    *_of_streams("{prefix}hc_head.hc_", "streams.leave."),
    *_of_streams(_LAYER + "hc_attn_", _OURS + "streams.attn."),
    *_of_streams(_LAYER + "hc_ffn_", _OURS + "streams.mlp."),
    rule(_LAYER + "attn.attn_sink", _OURS + "attn.sinks"),
    rule(_LAYER + "attn.compressor.ape", _OURS + "attn.entry.bias"),
    rule(_LAYER + "attn.indexer.compressor.ape", _OURS + "attn.index.bias"),
    rule(_LAYER + "ffn.gate.tid2eid", _OURS + "mlp.table"),
    select_bias_rule("ffn.gate.bias"),
    router_rule("ffn.gate"),
    *expert_rules("ffn.experts", _PROJECTIONS),
    *layer_rules(
        {
            "attn_norm": "attn_pre",
            "ffn_norm": "mlp_pre",
            "attn.wq_a": "attn.q_a",
            "attn.q_norm": "attn.q_a_norm",
            "attn.wq_b": "attn.q_b",
            "attn.wkv": "attn.row",
            "attn.norm": "attn.row_norm",
            "attn.wo_a": "attn.o_a",
            "attn.wo_b": "attn.o_b",
            "attn.compressor.wkv": "attn.entry.numbers",
            "attn.compressor.wgate": "attn.entry.gates",
            "attn.compressor.norm": "attn.entry.norm",
            "attn.indexer.compressor.wkv": "attn.index.numbers",
            "attn.indexer.compressor.wgate": "attn.index.gates",
            "attn.indexer.compressor.norm": "attn.index.norm",
            "attn.indexer.weights_proj": "attn.index.weights",
            "attn.indexer.wq_b": "attn.index.q",
            **{
                f"ffn.shared_experts.{stored}": f"mlp.shared.{part}"
                for stored, part in zip(_PROJECTIONS, ("gate", "up", "down"), strict=True)
            },
        }
    ),
)
"""Names as transformers stores them."""

_PUBLISHED = (
    ("embed_tokens.weight", "embed.weight"),
    ("attn.norm.weight", "attn.kv_norm.weight"),
    *((f"hc_head.hc_{part}", f"hc_head_{part}") for part in ("fn", "base", "scale")),
)
"""Ends of published names."""

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_BY_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: 4, _HEAVY: 128}
_BY_ID, _BY_SCORE = "hash_moe", "moe"


def _describe(c: ConfigReader) -> Decoder:
    c.only("attention_bias", False)
    c.only("mlp_bias", False)
    c.only("expert_dtype", "fp8", "fp4")  # of codes, where there are some (formats/fp8.py)
    c.only("num_key_value_heads", 1)
    # networks that draft further tokens are left out, and what says how they do it
    c.integer("num_nextn_predict_layers", None, minimum=0)
    c.ignore(*(f"dspark_{key}" for key in _DRAFTS))
    norm = rms(c, 1e-6)
    by_score, factor = _bounded(_experts(c))
    # a table that names the experts leaves nothing for a bias to choose
    by_id = replace(by_score, select_bias=False, by_id=c.integer("vocab_size"))
    streams = HyperStreams(
        count=c.integer("hc_mult", 4, minimum=2),
        norm_eps=norm.eps,
        eps=c.number("hc_eps", 1e-6),
        rounds=c.integer("hc_sinkhorn_iters", 20),
    )
    blocks = [
        Block(attn, by_id if kind == _BY_ID else by_score, replace(norm, kind="rms_late_cast"))
        for attn, kind in zip(_attentions(c, norm.eps), _mixtures(c), strict=True)
    ]
    scales = ((".up.weight", factor), (".down.weight", 1.0 / factor))
    return stack(c, blocks, streams=streams, leaf_scales=scales)


_DRAFTS = ("block_size", "markov_rank", "noise_token_id", "target_layer_ids")


def _experts(c: ConfigReader) -> Moe:
    """Experts that scores choose; `bound` is of gates before their activation."""
    c.only("scoring_func", "sqrtsoftplus")
    c.only("topk_method", "noaux_tc")
    c.only("norm_topk_prob", True)
    c.only("n_shared_experts", 1)
    c.only("hidden_act", "silu")
    width, bound = c.integer("moe_intermediate_size", 2048), c.number("swiglu_limit", 10.0)
    c.only("intermediate_size", width)
    return experts_of(
        c,
        "n_routed_experts",
        width=width,
        score="sqrt_softplus",
        scale=c.number("routed_scaling_factor", 1.5),
        select_bias=True,
        wide_router=True,
        bound=bound,
        shared=Mlp(width, bound=bound),
    )


def _bounded(moe: Moe) -> tuple[Moe, float]:
    """The mixture with the bound of `ops.bounded_gated`, which is of gates after their activation
    and of `up`, and the factor that `up` has then, which `down` takes back. Silu grows from its
    least value on, so silu(min(g, limit)) is min(silu(g), silu(limit)) for a positive limit.
    """
    assert moe.bound is not None and moe.shared is not None, "gates have a limit"
    factor = 1.0 / (1.0 + math.exp(-moe.bound))
    bound = moe.bound * factor
    return replace(moe, bound=bound, shared=replace(moe.shared, bound=bound)), factor


def _mixtures(c: ConfigReader) -> list[str]:
    depth = num_layers_of(c)
    first = c.integer("num_hash_layers", 3, minimum=0)
    usual = [_BY_ID if layer < first else _BY_SCORE for layer in range(depth)]
    return read_kinds(c, "mlp_layer_types", (_BY_ID, _BY_SCORE), usual)


def _attentions(c: ConfigReader, eps: float) -> list[CompressedAttention]:
    heads, dim = c.integer("num_attention_heads", 64), c.integer("head_dim", 512)
    groups = c.integer("o_groups", 8)
    if heads % groups:
        raise unsupported("o_groups", groups, f"a divisor of {heads} heads")
    main, compressed = _ropes(c, dim)
    sliding = CompressedAttention(
        heads=heads,
        head_dim=dim,
        window=c.integer("sliding_window", 128),
        q_rank=c.integer("q_lora_rank", 1024),
        groups=groups,
        group_rank=c.integer("o_lora_rank", 1024),
        eps=eps,
        rope=main,
    )
    indexer = EntryIndexer(
        heads=c.integer("index_n_heads", 64),
        dim=c.integer("index_head_dim", 128, minimum=compressed.dim),
        top_k=c.integer("index_topk", 512),
    )
    rates = _rates(c)
    of_kind = {
        _SLIDING: None,
        _SPARSE: Compression(rates[_SPARSE], overlaps=True, indexer=indexer),
        _HEAVY: Compression(rates[_HEAVY], overlaps=False),
    }
    return [
        sliding
        if kind == _SLIDING
        else replace(sliding, rope=compressed, compression=of_kind[kind])
        for kind in _kinds(c)
    ]


def _kinds(c: ConfigReader) -> list[str]:
    """`layer_types`, or older files' numbers, which also have entries of layers that draft."""
    depth = num_layers_of(c)
    usual = [_HEAVY if layer < 2 or layer % 2 == 0 else _SPARSE for layer in range(depth)]
    ratios = c.raw("compress_ratios", None)
    if ratios is not None:
        is_list = isinstance(ratios, list) and len(ratios) >= depth
        if not is_list or not all(ratio in _BY_RATIO for ratio in ratios):
            raise unsupported("compress_ratios", ratios, "0, 4 or 128 for each layer")
        usual = [_BY_RATIO[ratio] for ratio in ratios[:depth]]
    return read_kinds(c, "layer_types", (_SLIDING, _SPARSE, _HEAVY), usual)


def _rates(c: ConfigReader) -> dict[str, int]:
    """Number of tokens that an entry is for."""
    section = c.section("compress_rates")
    given = ConfigReader({}) if section is None else section
    older = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    return {
        kind: c.integer(older[kind], given.integer(kind, usual)) for kind, usual in _RATES.items()
    }


def _ropes(c: ConfigReader, dim: int) -> tuple[Rope, Rope]:
    """Rotations of layers without entries, and of those with some, which alone are scaled."""
    rotated = c.integer("qk_rope_head_dim", None)
    partial = c.number("partial_rotary_factor", 64 / 512 if rotated is None else rotated / dim)
    section = only_section(c)
    thetas = c.number("rope_theta", 1e4), c.number("compress_rope_theta", 1.6e5)
    parts: tuple[ConfigReader | None, ConfigReader | None] = (None, section)
    if section is not None and "main" in section:
        parts = section.section("main"), section.section("compress")
        section.ignore("rope_type", "rope_theta")
    found: list[Rope] = []
    for part, theta in zip(parts, thetas, strict=True):
        is_main = not found
        kinds = ("default",) if is_main else ("default", "yarn")
        # the base of layers with entries is the key of its own, whatever a flat object has
        rope = rope_from(part, dim, theta, partial, context_of(c), kinds, None)
        if section is not None and part is section:
            rope = replace(rope, theta=theta)
        if isinstance(rope.scaling, YarnScaling) and part is not None:
            part.only("truncate", True)  # whatever it is, transformers cuts the border off
            factor = part.number("attention_factor", 1.0)
            rope = replace(rope, scaling=replace(rope.scaling, attention_factor=factor))
        found.append(replace(rope, interleaved=True))
    main, compressed = found
    return main, compressed


FAMILY = Family(
    ("DeepseekV4ForCausalLM",),
    _describe,
    _RULES,
    other_ends=_PUBLISHED,
    ignored=(r"(.+\.)?mtp\..+",),
)
