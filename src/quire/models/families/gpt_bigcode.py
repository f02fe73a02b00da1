"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key/value head for all queries."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    attention,
    context_of,
    layer_norm,
    layer_rules,
    mlp,
    stack,
    top_rules,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder

_LAYER = "{prefix}h.{layer}."
RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    *layer_rules({"attn.c_attn": "attn.q attn.k attn.v"}, at=_LAYER, step="by_head"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            "attn.c_proj": "attn.o",
            "ln_2": "mlp_pre",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        at=_LAYER,
    ),
)


def _describe(c: ConfigReader) -> Decoder:
    c.rename(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    heads = c.integer("num_attention_heads")
    kv_heads = 1 if c.flag("multi_query", True) else heads
    c.only("num_key_value_heads", kv_heads)
    c.only("scale_attn_weights", True)
    attn = attention(c, kv_heads=kv_heads, rope=None, qkv_bias=True, o_bias=True)
    width = c.integer("n_inner", 4 * c.integer("hidden_size"))
    act_key, act = "activation_function", "gelu_pytorch_tanh"
    feed = mlp(c, width=width, act_key=act_key, act=act, gated=False, bias=True)
    return stack(
        c,
        Block(attn, feed, layer_norm(c, "layer_norm_epsilon")),
        learned_positions=context_of(c),
        tie=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    ("GPTBigCodeForCausalLM",),
    _describe,
    RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks that old files carry
)
