"""MiniMax-M3, text: attention to blocks of keys that an indexer chooses for each group of heads,
bounded gates as in gpt-oss, and experts chosen by sigmoids and a bias next to a shared one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    head_dim_of,
    layer_rules,
    num_experts_of,
    num_layers_of,
    read_flags,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    expert_rules,
    router_rule,
    select_bias_rule,
    shared_rules,
    sparse_by_type,
    stacked_expert_rules,
)
from quire.models.rules import Family
from quire.models.spec import (
    Attention,
    Block,
    BlockAttention,
    BlockIndexer,
    Decoder,
    Mlp,
    Moe,
    Norm,
)

_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")
_AT = "block_sparse_moe."
_RULES = (
    router_rule(_AT + "gate"),
    select_bias_rule(_AT + "e_score_correction_bias"),
    *expert_rules(_AT + "experts", ("w1", "w3", "w2")),
    *shared_rules(_AT + "shared_experts"),
    *layer_rules({f"self_attn.index_{p}": f"attn.index.{p.removesuffix('_proj')}" for p in _PARTS}),
    *RULES,
)
_RULES_OF_TRANSFORMERS = (
    router_rule("mlp.gate"),
    select_bias_rule("mlp.gate.e_score_correction_bias"),
    *stacked_expert_rules("mlp.experts"),
    *layer_rules(
        {
            "mlp.shared_experts.gate_up_proj": "mlp.shared.gate mlp.shared.up",
            "mlp.shared_experts.down_proj": "mlp.shared.down",
            "mlp.gate_up_proj": "mlp.gate mlp.up",
            **{f"self_attn.indexer.{p}": f"attn.index.{p.removesuffix('_proj')}" for p in _PARTS},
        }
    ),
    *RULES,
)
_SPARSE, _KINDS = "minimax_m3_sparse", ("full_attention", "minimax_m3_sparse")
_USUAL = {
    "attention_output_gate": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "swiglu_alpha": 1.702,  # the constant of `ops.clamped_gated`
}


def _describe(c: ConfigReader) -> Decoder:
    for key, usual in _USUAL.items():
        c.only(key, usual)
    c.only("hidden_act", "silu", "swigluoai")  # the same gate by either name
    norm, dim = rms(c, 1e-6, "rms1p"), head_dim_of(c, 128)
    attn = attention(c, head_dim=dim, theta=5e6, qk_norm=norm)
    assert attn.rope is not None
    c.only("rotary_dim", attn.rope.dim)  # what partial_rotary_factor says, too
    # heads that predict further tokens are left out
    c.ignore("num_mtp_modules", "num_nextn_predict_layers")
    chosen = _chosen(c, attn, norm)
    clamp = c.number("swiglu_limit", 7.0)
    dense = Mlp(c.integer("dense_intermediate_size"), clamp=clamp)
    blocks = [
        Block(mixer, _experts(c, clamp) if is_sparse else dense, norm)
        for mixer, is_sparse in zip(chosen, _sparse_layers(c), strict=True)
    ]
    return stack(c, blocks)


def _chosen(c: ConfigReader, attn: Attention, norm: Norm) -> list[Attention | BlockAttention]:
    found = c.section("sparse_attention_config")
    given = ConfigReader({}) if found is None else found
    given.only("use_sparse_attention", True)
    given.only("sparse_score_type", "max")
    given.only("sparse_init_block", 0)
    chosen = read_flags(given, "sparse_attention_freq", [False] * num_layers_of(c))
    if given.raw("sparse_disable_index_value", None) not in (None, chosen):
        raise unsupported(
            given.at("sparse_disable_index_value"),
            given.raw("sparse_disable_index_value"),
            "1 for each layer of sparse_attention_freq, since an indexer has no values",
        )
    kinds = read_kinds(c, "layer_types", _KINDS, [_KINDS[each] for each in chosen])

    def size(ours: str, published: str, default: int, **limits: Any) -> int:
        value: int = given.integer(published, c.integer(ours, default, **limits), **limits)
        return value

    heads = size("index_n_heads", "sparse_num_index_heads", 4)
    if attn.heads % heads:
        raise unsupported("index_n_heads", heads, f"a divisor of {attn.heads} query heads")
    assert attn.rope is not None
    top_k = size("index_topk_blocks", "sparse_topk_blocks", 16)
    indexer = BlockIndexer(
        heads=heads,
        dim=size("index_head_dim", "sparse_index_dim", 128, minimum=attn.rope.dim),
        size=size("index_block_size", "sparse_block_size", 128),
        top_k=top_k,
        local=size("index_local_blocks", "sparse_local_block", 1, minimum=0, maximum=top_k),
    )
    blocks = BlockAttention(
        *(attn.heads, attn.kv_heads, attn.head_dim, attn.scale), norm, attn.rope, indexer
    )
    return [blocks if kind == _SPARSE else attn for kind in kinds]


def _sparse_layers(c: ConfigReader) -> list[bool]:
    usual = read_flags(c, "moe_layer_freq", [True] * num_layers_of(c))
    c.only("first_k_dense_replace", usual.count(False))
    return sparse_by_type(c, usual)


def _experts(c: ConfigReader, clamp: float) -> Moe:
    experts, width = num_experts_of(c, "num_local_experts"), c.integer("intermediate_size")
    c.only("num_experts", experts)
    c.only("moe_intermediate_size", width)
    return Moe(
        experts,
        top_k=c.integer("num_experts_per_tok", maximum=experts),
        width=width,
        score="sigmoid",
        scale=c.number("routed_scaling_factor", 2.0),
        select_bias=True,
        clamp=clamp,
        shared=Mlp(c.integer("shared_intermediate_size"), clamp=clamp),
    )


PUBLISHED = Family(
    ("MiniMaxM3SparseForCausalLM", "MiniMaxM3ForCausalLM"),
    _describe,
    _RULES,
    ignored=(r"(.+\.)?mtp\..+",),
)
TRANSFORMERS = replace(
    PUBLISHED, architectures=("MiniMaxM3VLForCausalLM",), rules=_RULES_OF_TRANSFORMERS
)
"""The family as transformers stores its class for text alone."""
