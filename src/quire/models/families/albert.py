"""ALBERT: BERT with narrow embedding tables, and layers that run with the weights of a few."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.bert import TABLE_RULES, describe_bert
from quire.models.families.encoders import CLASSIFIER_RULES, UNUSED_HEADS, forms, hidden_layer
from quire.models.families.llama import num_layers_of
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Decoder

_PARTS = {
    **{f"attention.{name}": f"attn.{name[0]}" for name in ("query", "key", "value")},
    "attention.dense": "attn.o",
    "attention.LayerNorm": "attn_post",
    "ffn": "mlp.up",
    "ffn_output": "mlp.down",
    "full_layer_layer_norm": "mlp_post",
}


def _describe(c: ConfigReader) -> Decoder:
    c.supply(hidden_act="gelu_new")
    c.ignore(*("classifier_dropout_prob", "net_structure_type", "gap_size", "down_scale_factor"))
    c.only("num_memory_blocks", 0)
    c.only("inner_group_num", 1)
    decoder = describe_bert(c)
    layers, groups = num_layers_of(c), c.integer("num_hidden_groups", 1)
    if groups > layers:
        raise unsupported("num_hidden_groups", groups, f"at most num_hidden_layers={layers}")
    first: dict[int, int] = {}
    blocks = []
    for layer, block in enumerate(decoder.blocks):
        # divided in floats as transformers does it: where the groups do not divide the layers,
        # whole numbers would put the borders elsewhere
        of_group = first.setdefault(int(layer / (layers / groups)), layer)
        blocks.append(block if of_group == layer else replace(block, repeats=of_group))
    width = c.integer("embedding_size", 128)
    return replace(decoder, blocks=tuple(blocks), embed_width=width)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    """The weights of each group are those of its first layer."""
    firsts = [layer for layer, block in enumerate(decoder.blocks) if block.repeats is None]
    at = "{{prefix}}encoder.albert_layer_groups.{group}.albert_layers.0.{part}.{{leaf}}"
    return (
        *TABLE_RULES,
        rule("{prefix}encoder.embedding_hidden_mapping_in.{leaf}", "embed_proj.{leaf}"),
        *(
            rule(at.format(group=group, part=stored), f"layers.{layer}.{ours}.{{leaf}}")
            for group, layer in enumerate(firsts)
            for stored, ours in _PARTS.items()
        ),
    )


FAMILY = forms(
    Family(
        (),
        _describe,
        _rules,
        prefix="albert.",
        ignored=(
            r"embeddings\.position_ids",
            r"pooler\..*",
            r"(predictions|sop_classifier)\..*",
            UNUSED_HEADS,
        ),
    ),
    "Albert",
    layers=hidden_layer("tanh"),
    rules=(rule("{prefix}pooler.{leaf}", "pooler.layers.0.{leaf}"), *CLASSIFIER_RULES),
    others=("AlbertForPreTraining",),
)
