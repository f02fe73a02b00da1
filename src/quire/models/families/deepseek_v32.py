"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses;
in GLM-5 some layers take the choice of a layer before them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.deepseek import RULES
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import layer_rules, mlp, num_layers_of, read_kinds, rms, stack
from quire.models.families.mixtures import (
    deepseek_experts_of,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.positions import Rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Indexer, LatentAttention, Norm

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
    for key in ("n_group", "topk_group"):
        c.integer(key)  # which GLM-5's may leave out
    attn = latent_attention(c, interleaved=True, head_dim_key=None)
    # the indexer of V3.2 rotates halves, although its attention rotates neighbours
    indexer = _indexer(c, attn, heads=64, interleaved=False)
    return _stack(c, [replace(attn, indexer=indexer)] * num_layers_of(c), eps=1e-6)


def _describe_dsa(c: ConfigReader) -> Decoder:
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
