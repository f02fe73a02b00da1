"""Mistral Large 4: GLM-5's attention to chosen latents, which some layers have of an earlier one,
with queries that grow with their position, frequencies that are learned and layers that do not
rotate; experts chosen by softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.deepseek import INDEXER_NAMES, SHARED, indexer_types_of
from quire.models.families.latent_attention import latent_attention
from quire.models.families.llama import (
    LAYER,
    layer_rules,
    mlp,
    num_layers_of,
    read_flags,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    experts_of,
    groups_of,
    shared_expert,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.positions import LearnedTemperature
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Indexer, LatentAttention, Moe, Norm

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
"""The rotation of a config that has none."""


def _describe(c: ConfigReader) -> Decoder:
    if "rope_parameters" not in c and "rope_scaling" not in c:
        c.supply(rope_parameters=_ROPE)
    c.supply(n_routed_experts=128)
    c.ignore("head_dim")  # whatever it is, qk_rope_head_dim numbers rotate
    c.only("q_lora_rank", None)
    c.only("mlp_bias", False)
    c.only("norm_topk_prob", True)
    c.only("num_experts", c.integer("n_routed_experts"))
    depth = num_layers_of(c)
    read_kinds(c, "layer_types", ("indexed_attention",), ["indexed_attention"] * depth)
    attn = latent_attention(
        c, interleaved=True, head_dim_key=None, q_rank=None, rank=512, unrotated=64
    )
    norm, dense = rms(c, 1e-5), mlp(c)
    attn = replace(attn, norm=norm, temperature=LearnedTemperature())
    blocks = [Block(mixer, dense, norm) for mixer in _attentions(c, attn)]
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    cap = c.number("final_logit_softcapping", 30.0)
    return stack(c, with_experts(blocks, _experts(c), sparse), logit_softcap=cap)


def _attentions(c: ConfigReader, attn: LatentAttention) -> list[LatentAttention]:
    every = c.integer("no_rope_layer_interval", 4)
    depth = num_layers_of(c)
    turns = read_flags(c, "no_rope_layers", [(layer + 1) % every != 0 for layer in range(depth)])
    assert attn.rope is not None
    rope = replace(attn.rope, learned=True)
    turning = replace(attn, rope=rope)
    # heads keep their width: the part that others rotate joins the rest
    still = replace(attn, rope=None, unrotated=attn.unrotated + attn.rotated, rotated=0)
    indexer = Indexer(
        heads=c.integer("index_n_heads", 32),
        dim=c.integer("index_head_dim", 128, minimum=rope.dim),
        top_k=c.integer("index_topk", 2048),
        norm=Norm("layer", 1e-6, bias=True),
        rope=rope,
        query_norm=Norm("layer", 1e-6, bias=True),
        temperature=LearnedTemperature(),
    )
    found = []
    kinds, sources = indexer_types_of(c), _sources(c, turns)
    for turned, kind, source in zip(turns, kinds, sources, strict=True):
        own = replace(indexer, is_shared=kind == SHARED, rope=rope if turned else None)
        found.append(replace(turning if turned else still, indexer=own, shares=source))
    return found


def _sources(c: ConfigReader, turns: list[bool]) -> list[int | None]:
    """The layer whose latents each one reads; None: its own. It is the last before that others of
    its kind read: another one is what transformers has no place for.
    """
    own = list(range(len(turns)))
    sources: Any = c.raw("kv_source_layers", own)
    is_list = isinstance(sources, list) and len(sources) == len(own)
    if not is_list or any(
        not isinstance(s, int) or s not in range(i + 1) for i, s in enumerate(sources)
    ):
        raise unsupported("kv_source_layers", sources, "for each layer itself or an earlier one")
    read: dict[bool, int] = {}
    for layer, (turned, source) in enumerate(zip(turns, sources, strict=True)):
        if source == layer:
            if layer in sources[layer + 1 :]:
                read[turned] = layer
        elif read.get(turned) != source:
            allowed = "the last layer before, of those that rotate or do not, that others read"
            raise unsupported(f"kv_source_layers[{layer}]", source, allowed)
    return [None if source == layer else source for layer, source in enumerate(sources)]


def _experts(c: ConfigReader) -> Moe:
    width, num_shared = c.integer("moe_intermediate_size"), c.integer("n_shared_experts", 1)
    groups, top_groups = groups_of(c, c.integer("n_routed_experts"))
    moe = experts_of(
        c,
        "n_routed_experts",
        scale=c.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        wide_router=True,
        shared=shared_expert(c, width * num_shared),
    )
    if moe.top_k > moe.experts // groups * top_groups:
        raise unsupported("num_experts_per_tok", moe.top_k, "at most the experts of these groups")
    return moe


_PARTS = {
    "attention_norm": "attn_pre",
    "ffn_norm": "mlp_pre",
    "attention.wq": "attn.q",
    "attention.wkv_a_with_mqa": "attn.kv_a",
    "attention.kv_a_norm": "attn.kv_a_norm",
    "attention.wkv_b": "attn.kv_b",
    "attention.wo": "attn.o",
    **{f"attention.{stored}": ours for stored, ours in INDEXER_NAMES.items()},
    "attention.indexer.q_input_norm": "attn.index.q_norm",
    "gate": "mlp.router",
}
_PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
_FEEDS = {
    "feed_forward.": "mlp.",
    "shared_experts.": "mlp.shared.",
    "experts.{expert}.": "mlp.experts.{expert}.",
}
_TEMPERATURES = {"attention.": "attn.", "attention.indexer.": "attn.index."}
FAMILY = Family(
    ("MistralLarge4ForCausalLM",),
    _describe,
    (
        rule("{prefix}tok_embeddings.weight", "embed.weight"),
        rule("{prefix}norm.weight", "norm.weight"),
        rule("output.weight", "head.weight"),
        rule("{prefix}lerope.alpha", "rope.factors"),
        *layer_rules(_PARTS),
        *layer_rules(
            {
                f"{at}{stored}": f"{ours}{part}"
                for at, ours in _FEEDS.items()
                for stored, part in _PROJECTIONS.items()
            }
        ),
        *(
            rule(f"{LAYER}{at}ssmax_scaling.{part[0]}", f"layers.{{layer}}.{ours}temper.{part}")
            for at, ours in _TEMPERATURES.items()
            for part in ("scale", "bias")
        ),
    ),
    ignored=(r"mtp_dspark\..+", r"pre_mm_projector_norm\.weight"),
)
"""The names are those of published files, which transformers writes as well."""
