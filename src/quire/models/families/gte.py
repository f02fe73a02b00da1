"""GTE, as Alibaba's NewModel: BERT with rotated positions and gated units, the gate second."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import (
    POOLER_RULES,
    UNUSED_HEADS,
    check_encoder,
    forms,
    hidden_layer,
    whole_attention,
)
from quire.models.families.llama import context_of, layer_norm, layer_rules, mlp, stack
from quire.models.positions import LinearScaling, Rope
from quire.models.rope_config import LEAST_THETA, read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

_RULES = (
    rule("{prefix}embeddings.word_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
    rule("{prefix}embeddings.LayerNorm.{leaf}", "embed_norm.{leaf}"),
    *layer_rules(
        {
            "attention.qkv_proj": "attn.q attn.k attn.v",
            "attention.o_proj": "attn.o",
            "attn_ln": "attn_post",
            "mlp.up_gate_proj": "mlp.up mlp.gate",
            "mlp.down_proj": "mlp.down",
            "mlp_ln": "mlp_post",
        },
        at="{prefix}encoder.layer.{layer}.",
    ),
)


def _describe(c: ConfigReader) -> Decoder:
    check_encoder(c)
    c.only("position_embedding_type", "rope")
    c.only("layer_norm_type", "layer_norm")
    c.only("pack_qkv", True)
    for key in ("logn_attention_scale", "logn_attention_clip1"):
        c.only(key, False)
    c.ignore("unpad_inputs", "use_memory_efficient_attention")
    attn = whole_attention(c, qkv_bias=True, o_bias=True)
    norm = layer_norm(c, eps=c.number("layer_norm_eps", 1e-12))
    feed = mlp(c, act="gelu", out_bias=True)
    return stack(
        c,
        Block(replace(attn, rope=_rope(c, attn.head_dim)), feed, norm, norms_sum=True),
        embed_norm=norm,
        final_norm=None,
        token_types=c.integer("type_vocab_size", 1, minimum=0),
        tie=False,
    )


def _rope(c: ConfigReader, head_dim: int) -> Rope:
    """`ntk` with a factor f: a base f times as large, and all positions divided by f^(2 / D)."""
    scaling = c.raw("rope_scaling", {})
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return read_rope(
            c, head_dim, theta=160000.0, context=context_of(c), kinds=("default", "linear")
        )
    section = c.section("rope_scaling")
    assert section is not None, "it has a type"
    section.raw("type")
    factor = section.number("factor", minimum=1.0)
    theta = c.number("rope_theta", 10000.0, minimum=LEAST_THETA)
    return Rope(theta * factor, head_dim, LinearScaling(factor ** (2 / head_dim)))


def _forms(stem: str, prefix: str) -> tuple[Family, Family, Family]:
    return forms(
        Family((), _describe, _RULES, prefix=prefix, ignored=(r"pooler\.dense\..*", UNUSED_HEADS)),
        stem,
        layers=hidden_layer("tanh"),
        rules=POOLER_RULES,
    )


GTE = _forms("Gte", "gte.")
NEW = _forms("New", "new.")
GTE_NEW = _forms("GteNew", "new.")
