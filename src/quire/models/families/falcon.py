"""Falcon: parallel blocks with one or two layer norms and few key/value heads, or sequential ones
with linear biases (ALiBi). transformers rounds these biases to bfloat16; here they are exact.
"""

from __future__ import annotations

from typing import Any, Literal

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    attention,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    stack,
    top_rules,
)
from quire.models.positions import Alibi
from quire.models.rope_config import read_rope
from quire.models.rules import Family, Rule
from quire.models.spec import Attention, Block, Decoder

_LAYER = "{prefix}h.{layer}."
_RULES = (
    *top_rules("word_embeddings", "ln_f"),
    *layer_rules(
        {"self_attention.query_key_value": "attn.q attn.k attn.v"}, at=_LAYER, step="by_head"
    ),
    *layer_rules(
        {
            "self_attention.dense": "attn.o",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        at=_LAYER,
    ),
)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    names = {"input_layernorm": "attn_pre", "post_attention_layernorm": "mlp_pre"}
    if decoder.blocks[0].parallel == "two_norms":
        names = {"ln_attn": "attn_pre", "ln_mlp": "mlp_pre"}
    return _RULES + layer_rules(names, at=_LAYER)


def _describe(c: ConfigReader) -> Decoder:
    c.rename(
        hidden_size="n_embed",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        num_kv_heads="n_head_kv",
    )
    c.only("apply_residual_connection_post_layernorm", False)
    bias, is_new = c.flag("bias", False), c.flag("new_decoder_architecture", False)
    width = c.integer("ffn_hidden_size", 4 * c.integer("hidden_size"))
    c.only("ff_factor", width // c.integer("hidden_size"))
    block = Block(
        _attention(c, is_new, bias),
        mlp(c, width=width, act_key="activation", act="gelu", gated=False, bias=bias),
        layer_norm(c, "layer_norm_epsilon"),
        parallel=_parallel(c, is_new),
    )
    context = c.integer("max_position_embeddings", 2048)
    return stack(c, block, context=context, tie=c.flag("tie_word_embeddings", True))


def _attention(c: ConfigReader, is_new: bool, bias: bool) -> Attention:
    dim, heads = head_dim_of(c), c.integer("num_attention_heads")
    shared = c.flag("multi_query", True)
    kv_heads = c.integer("num_kv_heads", heads)
    # transformers reads num_kv_heads in the new architecture alone; older files may have any number
    # there
    if not is_new and shared:
        kv_heads = 1
    elif not is_new:
        c.only("num_kv_heads", heads)
    facts: dict[str, Any] = {"kv_heads": kv_heads, "qkv_bias": bias, "o_bias": bias}
    if c.flag("alibi", False):  # the bias is scaled as the scores are
        for key in ("rope_parameters", "rope_scaling", "rope_theta"):
            c.raw(key, None)  # files have them without rotating
        return attention(c, head_dim=dim, rope=None, alibi=Alibi(scale=dim**-0.5), **facts)
    context = c.integer("max_position_embeddings", 2048)
    return attention(c, head_dim=dim, rope=read_rope(c, dim, context=context), **facts)


def _parallel(c: ConfigReader, is_new: bool) -> Literal["no", "two_norms", "one_norm"]:
    """The way in which the parts of a block are joined."""
    if is_new:
        c.only("parallel_attn", True)
        norms = c.integer("num_ln_in_parallel_attn", 2, maximum=2)
        return "two_norms" if norms == 2 else "one_norm"
    c.only("num_ln_in_parallel_attn", 1)
    return "one_norm" if c.flag("parallel_attn", True) else "no"


FAMILY = Family(("FalconForCausalLM",), _describe, _rules, prefix="transformer.")
