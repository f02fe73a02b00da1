"""DeepSeek-V2, V3 and V3.2, and families of their layers in other sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.latent_attention import LATENT_RULES, latent_attention
from quire.models.families.llama import (
    layer_rules,
    mlp,
    norm_rules,
    num_layers_of,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    deepseek_experts_of,
    experts_of,
    shared_expert,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.positions import Rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Indexer, LatentAttention, Moe, Norm

RULES = LATENT_RULES + DEEPSEEK_RULES


def _describe_deepseek_v2(c: ConfigReader) -> Decoder:
    """DeepSeek-V2 and V2-Lite: latent attention, dense layers, then experts, some shared."""
    c.only("mlp_bias", False)
    attn = latent_attention(c, interleaved=True)
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    return stack(c, with_experts(dense, _experts(c), sparse_after(c)))


def _experts(c: ConfigReader) -> Moe:
    c.only("scoring_func", "softmax")
    # transformers has the key and does not read it, while the published code divides by the sum
    c.only("norm_topk_prob", False)
    c.only("moe_layer_freq", 1)
    width = c.integer("moe_intermediate_size")
    moe = experts_of(
        c,
        "n_routed_experts",
        renorm=False,
        scale=c.number("routed_scaling_factor", 1.0),
        wide_router=True,
        shared=shared_expert(c, width * c.integer("n_shared_experts")),
    )
    return replace(moe, **_groups(c, moe))


def _groups(c: ConfigReader, moe: Moe) -> dict[str, Any]:
    """Groups of experts, of which only the best take part where `topk_method` says so."""
    is_limited = c.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    if not is_limited:
        # files with plain choice keep both keys, without a meaning
        c.integer("n_group", None)
        c.integer("topk_group", None)
        return {}
    groups = c.integer("n_group")
    if moe.experts % groups:
        raise unsupported("n_group", groups, f"a divisor of {moe.experts} experts")
    top_groups = c.integer("topk_group", maximum=groups)
    if top_groups * (moe.experts // groups) < moe.top_k:
        allowed = f"groups that have {moe.top_k} experts together"
        raise unsupported("topk_group", top_groups, allowed)
    return {"groups": groups, "top_groups": top_groups, "group_best": 1}


DEEPSEEK_V2 = Family(("DeepseekV2ForCausalLM",), _describe_deepseek_v2, RULES)


def _describe_deepseek_v3(c: ConfigReader) -> Decoder:
    """DeepSeek-V3, R1, Kimi-K2: latent attention, then experts by sigmoids and a learned bias."""
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    for key in ("n_group", "topk_group", "n_shared_experts"):
        c.integer(key)  # which others that have these experts may leave out
    attn = latent_attention(c)
    dense = Block(attn, mlp(c), rms(c, 1e-6))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse_after(c, dense=3)))


DEEPSEEK_V3 = Family(
    ("DeepseekV3ForCausalLM",), _describe_deepseek_v3, RULES, drafts_after_layers=True
)


def _describe_glm4_moe_lite(c: ConfigReader) -> Decoder:
    """GLM-4.7-Flash: DeepSeek-V3's attention and experts in other sizes."""
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    attn = latent_attention(c, q_rank=768, unrotated=192, value_dim=256)
    dense = Block(attn, mlp(c), rms(c, 1e-5))
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse))


GLM4_MOE_LITE = Family(
    ("Glm4MoeLiteForCausalLM",), _describe_glm4_moe_lite, RULES, drafts_after_layers=True
)


def _describe_axk1(c: ConfigReader) -> Decoder:
    """A.X K1: DeepSeek-V3 with a norm after the feed-forward parts that have experts."""
    for key in ("n_group", "topk_group"):
        c.integer(key)  # which others that have these experts may leave out
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    dense = Block(latent_attention(c), mlp(c), rms(c, 1e-6))
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    blocks = with_experts(dense, deepseek_experts_of(c), sparse)
    return stack(c, [replace(b, mlp_post=isinstance(b.mlp, Moe)) for b in blocks])


AXK1 = Family(
    ("AXK1ForCausalLM",),
    _describe_axk1,
    RULES + norm_rules(mlp_post="post_mlp_layernorm"),
    drafts_after_layers=True,
)


def _describe_youtu(c: ConfigReader) -> Decoder:
    """Youtu-LLM: latent attention with a dense feed-forward part in every layer."""
    c.only("mlp_bias", False)  # which transformers does not read
    attn = latent_attention(c)
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)), tie=c.flag("tie_word_embeddings", True))


YOUTU = Family(("YoutuForCausalLM",), _describe_youtu, LATENT_RULES)


INDEXER_NAMES = {
    "indexer.wq_b": "attn.index.q",
    "indexer.wk": "attn.index.k",
    "indexer.weights_proj": "attn.index.weights",
    "indexer.k_norm": "attn.index.k_norm",
}
_RULES = RULES + layer_rules({f"self_attn.{name}": ours for name, ours in INDEXER_NAMES.items()})
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_FULL, SHARED = "full", "shared"


def _describe_v32(c: ConfigReader) -> Decoder:
    """DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses."""
    for key in ("n_group", "topk_group"):
        c.integer(key)  # which GLM-5's may leave out
    attn = latent_attention(c, interleaved=True, head_dim_key=None)
    # the indexer of V3.2 rotates halves, although its attention rotates neighbours
    indexer = _indexer(c, attn, heads=64, interleaved=False)
    return _stack(c, [replace(attn, indexer=indexer)] * num_layers_of(c), eps=1e-6)


def _describe_dsa(c: ConfigReader) -> Decoder:
    """GLM-5: DeepSeek-V3.2 in which some layers take the choice of a layer before them."""
    c.only("indexer_rope_interleave", True)
    attn = latent_attention(
        c, interleaved=True, head_dim_key=None, q_rank=2048, unrotated=192, value_dim=256
    )
    indexer = _indexer(c, attn, heads=32, interleaved=True)
    kinds = indexer_types_of(c)
    return _stack(
        c,
        [replace(attn, indexer=replace(indexer, is_shared=kind == SHARED)) for kind in kinds],
        eps=1e-5,
    )


def _stack(c: ConfigReader, attentions: Iterable[LatentAttention], eps: float) -> Decoder:
    c.only("mlp_bias", False)
    c.only("rope_interleave", True)
    c.only("num_experts", c.integer("n_routed_experts"))
    c.ignore("head_dim")  # whatever it is, qk_rope_head_dim numbers rotate
    # their layers follow the decoder's and are left out
    c.integer("num_nextn_predict_layers", None, minimum=0)
    read_kinds(c, "layer_types", _INDEXED, [_INDEXED[0]] * num_layers_of(c))
    dense, norm = mlp(c), rms(c, eps)
    blocks = [Block(attn, dense, norm) for attn in attentions]
    sparse = sparse_by_type(c, sparse_after(c, dense=3))
    return stack(c, with_experts(blocks, deepseek_experts_of(c), sparse))


def _indexer(c: ConfigReader, attn: LatentAttention, heads: int, interleaved: bool) -> Indexer:
    if attn.q_rank is None:
        raise unsupported("q_lora_rank", None, "a number, of which the indexer makes its queries")
    assert attn.rope is not None
    dim = c.integer("index_head_dim", 128, minimum=attn.rope.dim)
    return Indexer(
        heads=c.integer("index_n_heads", heads),
        dim=dim,
        top_k=c.integer("index_topk", 2048),
        norm=Norm("layer", 1e-6, bias=True),
        rope=Rope(attn.rope.theta, attn.rope.dim, attn.rope.scaling, interleaved),
    )


def indexer_types_of(c: ConfigReader) -> list[str]:
    """`indexer_types`, or in older keys a pattern, or every `index_topk_freq`-th later layer."""
    every = c.integer("index_topk_freq", 1)
    first = c.integer("index_skip_topk_offset", 2, minimum=0)
    usual = [
        SHARED if max(layer - first + 1, 0) % every else _FULL for layer in range(num_layers_of(c))
    ]
    pattern = c.raw("index_topk_pattern", None)
    if isinstance(pattern, str):
        usual = [{"F": _FULL, "S": SHARED}.get(kind, kind) for kind in pattern]
    elif pattern is not None:
        usual = pattern
    if len(usual) != num_layers_of(c) or set(usual) - {_FULL, SHARED}:
        raise unsupported("index_topk_pattern", pattern, "F or S for each layer")
    kinds = read_kinds(c, "indexer_types", (_FULL, SHARED), usual)
    if kinds[0] == SHARED:
        raise unsupported("indexer_types", kinds, "full in the first layer")
    return kinds


DEEPSEEK_V32 = Family(("DeepseekV32ForCausalLM",), _describe_v32, _RULES, drafts_after_layers=True)
GLM_MOE_DSA = Family(("GlmMoeDsaForCausalLM",), _describe_dsa, _RULES, drafts_after_layers=True)
