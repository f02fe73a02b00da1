"""DeBERTa v2 and v3: BERT whose scores also have products of queries with keys of positions, and of
keys with queries of positions, which are products of one table.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.bert import OLDER_NORMS, TABLE_RULES, describe_bert
from quire.models.families.encoders import (
    CLASSIFIER_RULES,
    HEAD_ACTIVATIONS,
    UNUSED_HEADS,
    forms,
)
from quire.models.families.llama import context_of, layer_rules
from quire.models.pooling.spec import HeadLayer
from quire.models.positions import DisentangledScores
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Decoder

_RULES = (
    *TABLE_RULES,
    rule("{prefix}encoder.rel_embeddings.weight", "distances.weight"),
    rule("{prefix}encoder.LayerNorm.{leaf}", "distances.norm.{leaf}"),
    *layer_rules(
        {
            "attention.self.query_proj": "attn.q",
            "attention.self.key_proj": "attn.k",
            "attention.self.value_proj": "attn.v",
            "attention.self.pos_key_proj": "attn.position_k",
            "attention.self.pos_query_proj": "attn.position_q",
            "attention.output.dense": "attn.o",
            "attention.output.LayerNorm": "attn_post",
            "intermediate.dense": "mlp.up",
            "output.dense": "mlp.down",
            "output.LayerNorm": "mlp_post",
        },
        at="{prefix}encoder.layer.{layer}.",
    ),
)
_KINDS = ("c2p", "p2c")
_OF_HEADS = ("legacy", "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size")


def _describe(c: ConfigReader) -> Decoder:
    c.ignore(*_OF_HEADS)
    c.supply(type_vocab_size=0, layer_norm_eps=1e-7)
    c.only("conv_kernel_size", 0)
    c.ignore("conv_act", "conv_groups")
    width = c.integer("hidden_size")
    c.only("embedding_size", width)
    distances, kinds = _distances(c), _attention_kinds(c)
    decoder = describe_bert(c, distances=distances)
    attn = decoder.blocks[0].mixer
    assert isinstance(attn, Attention), "as BERT"
    # each kind adds one product to a score; the scale counts them, so that the sum has the spread
    # of one
    scale = (attn.head_dim * (1 + len(kinds))) ** -0.5
    block = replace(decoder.blocks[0], mixer=replace(attn, scale=scale))
    decoder = replace(decoder, blocks=(block,) * len(decoder.blocks))
    has_positions = c.flag("position_biased_input", True)
    return decoder if has_positions else replace(decoder, learned_positions=0)


def _attention_kinds(c: ConfigReader) -> list[str]:
    """`pos_att_type`: a list, or names with bars; without relative attention only for a scale."""
    given = c.raw("pos_att_type", [])
    kinds = [kind.strip() for kind in given.lower().split("|")] if isinstance(given, str) else given
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise unsupported("pos_att_type", given, "c2p and p2c, or one of them")
    return sorted(set(kinds))


def _distances(c: ConfigReader) -> DisentangledScores | None:
    c.ignore("max_relative_positions", "position_buckets", "norm_rel_ebd", "share_att_key")
    if not c.flag("relative_attention", False):
        return None
    kinds = _attention_kinds(c)
    longest = c.integer("max_relative_positions", -1, minimum=-1)
    longest = context_of(c) if longest < 1 else longest
    buckets = c.integer("position_buckets", -1, minimum=-1)
    # far distances are shared out by log(distance / half) / log((longest - 1) / half), whose
    # divisor has to be positive
    if buckets > 0 and (buckets < 4 or longest - 1 <= buckets // 2):
        allowed = f"from 4 to less than twice max_relative_positions={longest}, or -1"
        raise unsupported("position_buckets", buckets, allowed)
    norms = c.choice("norm_rel_ebd", {"none": False, "layer_norm": True}, "none")
    return DisentangledScores(
        span=buckets if buckets > 0 else longest,
        max_distance=longest if buckets > 0 else None,
        has_keys="c2p" in kinds,
        has_queries="p2c" in kinds,
        shares_products=c.flag("share_att_key", False),
        eps=c.number("layer_norm_eps", 1e-7) if norms else None,
    )


def _pooler(c: ConfigReader) -> tuple[HeadLayer, ...]:
    act = c.choice("pooler_hidden_act", HEAD_ACTIVATIONS, "gelu")
    width = c.integer("hidden_size")
    c.only("pooler_hidden_size", width)
    return (HeadLayer(width, act),)


FAMILY = forms(
    Family(
        (),
        _describe,
        _RULES,
        prefix="deberta.",
        ignored=(
            r"embeddings\.position_(ids|embeddings\.weight)",
            r"(lm_predictions|mask_predictions|pooler)\..*",
            UNUSED_HEADS,
        ),
        other_ends=OLDER_NORMS,
    ),
    "DebertaV2",
    layers=_pooler,
    rules=(rule("pooler.dense.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
)
