"""GPT-NeoX, the Japanese one, and Persimmon."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    LAYER,
    PRE_NORM_RULES,
    attention,
    biases,
    layer_norm,
    layer_rules,
    mlp,
    num_layers_of,
    stack,
    top_rules,
)
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder

GPT_NEOX_RULES = (
    *top_rules("embed_in", "final_layer_norm", "embed_out"),
    *layer_rules({"attention.query_key_value": "attn.q attn.k attn.v"}, step="by_head"),
    *layer_rules(
        {
            "attention.dense": "attn.o",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        }
    ),
    *PRE_NORM_RULES,
)


def _describe_gpt_neox(c: ConfigReader) -> Decoder:
    """GPT-NeoX and Pythia: parallel blocks, two layer norms, a quarter of heads rotated, biases."""
    c.rename(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    attn = attention(c, partial=0.25, **biases(c, True))
    feed = mlp(c, act="gelu", gated=False, bias=True)
    is_parallel = c.flag("use_parallel_residual", True)
    block = Block(attn, feed, layer_norm(c), parallel="two_norms" if is_parallel else "no")
    return stack(c, block)


GPT_NEOX = Family(
    ("GPTNeoXForCausalLM",),
    _describe_gpt_neox,
    GPT_NEOX_RULES,
    prefix="gpt_neox.",
    # causal masks and frequencies that old files carry
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)


def _describe_gpt_neox_japanese(c: ConfigReader) -> Decoder:
    """GPT-NeoX Japanese: sequential blocks without biases but the last attention output's."""
    c.rename(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    c.only("is_decoder", False, True)  # which changes nothing
    width = c.integer("hidden_size") * c.integer("intermediate_multiple_size", 4)
    feed = mlp(c, width=width, act="gelu", gated=False)
    block = Block(attention(c), feed, layer_norm(c))
    *first, last = [block] * num_layers_of(c)
    assert isinstance(last.mixer, Attention)
    last = replace(last, mixer=replace(last.mixer, o_bias=True))
    return stack(c, [*first, last], tie=c.flag("tie_word_embeddings", True))


GPT_NEOX_JAPANESE = Family(
    ("GPTNeoXJapaneseForCausalLM",),
    _describe_gpt_neox_japanese,
    (rule(LAYER + "attention.dense_bias", "layers.{layer}.attn.o.bias"), *GPT_NEOX_RULES),
    prefix="gpt_neox_japanese.",
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)


PERSIMMON_RULES = (
    *top_rules("embed_tokens", "final_layernorm"),
    *layer_rules({"self_attn.query_key_value": "attn.q attn.k attn.v"}, step="by_head"),
    *layer_rules(
        {
            "self_attn.dense": "attn.o",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        }
    ),
    *PRE_NORM_RULES,
)


def _describe_persimmon(c: ConfigReader) -> Decoder:
    """Persimmon: layer norms, also of query and key heads, half of heads rotated, squared relu."""
    norm = layer_norm(c)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("qk_layernorm", True) else None,
        qkv_bias=True,
        o_bias=True,
    )
    return stack(c, Block(attn, mlp(c, act="relu2", gated=False, bias=True), norm))


PERSIMMON = Family(("PersimmonForCausalLM",), _describe_persimmon, PERSIMMON_RULES)
