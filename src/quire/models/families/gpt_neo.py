"""GPT-Neo: GPT-2 with windows in every other layer, scores without a scale, and plain linears."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    context_of,
    layer_norm,
    layer_rules,
    mlp,
    num_layers_of,
    stack,
    top_rules,
)
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder

_RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            "ln_2": "mlp_pre",
            **{f"attn.attention.{part}_proj": f"attn.{part}" for part in "qkv"},
            "attn.attention.out_proj": "attn.o",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        at="{prefix}h.{layer}.",
    ),
)
_OF_TRAINING = ("resid_dropout", "embed_dropout", "classifier_dropout")


def _describe(c: ConfigReader) -> Decoder:
    c.rename(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    c.ignore(*_OF_TRAINING)
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if width % heads:
        raise unsupported("num_heads", heads, f"a divisor of hidden_size={width}")
    attn = Attention(heads, heads, width // heads, 1.0, o_bias=True)
    feed = mlp(
        c,
        width=c.integer("intermediate_size", 4 * width),
        act_key="activation_function",
        act="gelu_new",
        gated=False,
        bias=True,
    )
    block = Block(attn, feed, layer_norm(c, "layer_norm_epsilon"))
    windows = {"global": None, "local": c.integer("window_size", 256)}
    blocks = [replace(block, mixer=replace(attn, window=windows[kind])) for kind in _kinds(c)]
    return stack(
        c, blocks, learned_positions=context_of(c), tie=c.flag("tie_word_embeddings", True)
    )


def _kinds(c: ConfigReader) -> list[str]:
    """`attention_types`: lists of kinds, each with how often it is repeated."""
    given = c.raw("attention_types", [[["global", "local"], 12]])
    c.ignore("attention_layers")  # the same written out
    try:
        kinds = [kind for turn, count in given for _ in range(count) for kind in turn]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers_of(c) or not set(kinds) <= {"global", "local"}:
        allowed = "lists of global and local with their repetitions, one for each layer"
        raise unsupported("attention_types", given, allowed)
    return kinds


FAMILY = Family(
    ("GPTNeoForCausalLM",),
    _describe,
    _RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),  # masks that old files carry
)
