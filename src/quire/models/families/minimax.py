"""MiniMax: 01, M2 and M3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ATTENTION_RULES,
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
    experts_of,
    router_rule,
    select_bias_rule,
    shared_rules,
    sparse_by_type,
    stacked_expert_rules,
)
from quire.models.mixers.recurrent.spec import Lightning
from quire.models.rules import Family, Rule, rule
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

_FULL, _LINEAR = "full_attention", "linear_attention"


def _describe_minimax(c: ConfigReader) -> Decoder:
    """MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention in every eighth layer,
    experts, and residual sums that are weighed and normed.
    """
    c.only("sliding_window", None)
    depth, norm = num_layers_of(c), rms(c, 1e-5)
    attn = attention(c, theta=1e6)
    alpha, beta = (_factor(c, which) for which in ("alpha", "beta"))
    # The stream is what the norms give: x = norm(alpha * x + beta * f(x)), of which only epsilon
    # shows the size.
    summed = replace(norm, eps=norm.eps / alpha**2)
    moe = experts_of(c, "num_local_experts", width=c.integer("intermediate_size"))
    c.ignore("block_size")  # of the sums in which a state is computed
    blocks = []
    for layer, kind in enumerate(_kinds(c)):
        # decays fall with the depth; the two 1e-5 are those of transformers, which keep the last
        # from 0
        slope = 1 - layer / (depth - 1 + 1e-5) + 1e-5
        lightning = Lightning(attn.heads, attn.head_dim, slope, 1e-6, act=moe.act)
        mixer = attn if kind == _FULL else lightning
        blocks.append(Block(mixer, moe, summed, residual_scale=beta / alpha, norms_sum=True))
    # the embedding is not a sum, so its epsilon stays; the last sum's norm is the final one
    return stack(c, blocks, embed_norm=norm, final_norm=None)


def _factor(c: ConfigReader, which: str) -> float:
    """One for all sums: what a layer's sum hands on is normed before the next."""
    keys = [f"{part}_{which}_factor" for part in ("mlp", "full_attn", "linear_attn")]
    first, *others = (float(c.number(key, 1.0)) for key in keys)
    for key, value in zip(keys[1:], others, strict=True):
        if value != first:
            raise unsupported(key, value, f"the same as {keys[0]}={first:g}")
    return first


def _kinds(c: ConfigReader) -> list[str]:
    """`layer_types`, or `attn_type_list` of the first files: 1 is softmax attention."""
    depth = num_layers_of(c)
    usual = [_LINEAR if i % 2 else _FULL for i in range(depth)]
    listed = c.raw("attn_type_list", None)
    if listed is not None:
        if not isinstance(listed, list) or set(listed) - {0, 1}:
            raise unsupported("attn_type_list", listed, "0 or 1 for each layer")
        usual = [_FULL if kind else _LINEAR for kind in listed]
    return read_kinds(c, "layer_types", (_FULL, _LINEAR), usual)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    """A layer's norm of its input is that of the sum before it."""
    depth = len(decoder.blocks)
    norms = [rule("{prefix}layers.0.input_layernorm.{leaf}", "embed_norm.{leaf}")]
    for layer in range(1, depth):
        source = f"{{prefix}}layers.{layer}.input_layernorm.{{leaf}}"
        norms.append(rule(source, f"layers.{layer - 1}.mlp_post.{{leaf}}"))
    return (
        *norms,
        rule("{prefix}norm.{leaf}", f"layers.{depth - 1}.mlp_post.{{leaf}}"),
        rule("{prefix}embed_tokens.{leaf}", "embed.{leaf}"),
        rule("lm_head.{leaf}", "head.{leaf}"),
        *layer_rules({"post_attention_layernorm": "attn_post"}),
        *layer_rules({"self_attn.qkv_proj": "mixer.q mixer.k mixer.v"}, step="by_head"),
        *layer_rules(
            {
                "self_attn.output_gate": "mixer.z",
                "self_attn.out_proj": "mixer.out",
                "self_attn.norm": "mixer.norm",
            }
        ),
        *ATTENTION_RULES,
        router_rule("block_sparse_moe.gate"),
        *expert_rules("block_sparse_moe.experts", ("w1", "w3", "w2")),
    )


MINIMAX = Family(
    ("MiniMaxForCausalLM",),
    _describe_minimax,
    _rules,
    # numbers that follow from the heads
    ignored=(r"layers\.\d+\.self_attn\.((query|key|diagonal)_decay|slope_rate)",),
)


_AT = "block_sparse_moe."
_MINIMAX_M2_RULES = (
    router_rule(_AT + "gate"),
    select_bias_rule(_AT + "e_score_correction_bias"),
    *expert_rules(_AT + "experts", ("w1", "w3", "w2")),
    *RULES,
)


def _describe_minimax_m2(c: ConfigReader) -> Decoder:
    """MiniMax-M2: norms over the full width of queries and keys, part of each head rotated,
    Mixtral's experts chosen by sigmoids and a bias.
    """
    norm, dim = rms(c, 1e-6), head_dim_of(c, 128)
    _refuse_other_forms(c)
    # how much of a head is rotated
    rotated = c.integer("rotary_dim", dim, minimum=2, maximum=dim)
    attn = attention(
        c, head_dim=dim, theta=5e6, partial=rotated / dim, qk_norm=norm, qk_norm_over="full"
    )
    moe = experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="sigmoid",
        select_bias=True,
    )
    return stack(c, Block(attn, moe, norm))


def _refuse_other_forms(c: ConfigReader) -> None:
    """Keys of the released files that other models of this maker use."""
    c.only("scoring_func", "sigmoid")
    c.only("use_routing_bias", True)
    c.only("use_qk_norm", True)
    c.only("qk_norm_type", "per_layer")
    c.only("shared_intermediate_size", 0)
    c.only("sliding_window", None)
    for part in ("full_attention", "linear_attention", "mlp"):
        c.only(f"layernorm_{part}_beta", 1.0)
    types = c.raw("attn_type_list", [])
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise unsupported("attn_type_list", types, "1 for every layer")
    # of shared experts and dense layers, of which there are none
    c.ignore("shared_moe_mode", "mlp_intermediate_size")
    # heads that predict further tokens are left out
    c.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")


MINIMAX_M2 = Family(("MiniMaxM2ForCausalLM",), _describe_minimax_m2, _MINIMAX_M2_RULES)


_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")
_MINIMAX_M3_RULES = (
    *shared_rules(_AT + "shared_experts"),
    *layer_rules({f"self_attn.index_{p}": f"attn.index.{p.removesuffix('_proj')}" for p in _PARTS}),
    *_MINIMAX_M2_RULES,
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
_SPARSE = "minimax_m3_sparse"
_KINDS = (_FULL, _SPARSE)
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


def _describe_minimax_m3(c: ConfigReader) -> Decoder:
    """MiniMax-M3, text: attention to blocks of keys that an indexer chooses for each group of
    heads, bounded gates as in gpt-oss, and experts chosen by sigmoids and a bias next to a
    shared one.
    """
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
    _describe_minimax_m3,
    _MINIMAX_M3_RULES,
    ignored=(r"(.+\.)?mtp\..+",),
)
TRANSFORMERS = replace(
    PUBLISHED, architectures=("MiniMaxM3VLForCausalLM",), rules=_RULES_OF_TRANSFORMERS
)
"""The family as transformers stores its class for text alone."""
