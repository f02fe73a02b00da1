"""GPT-NeoX and Pythia: parallel blocks with two layer norms, a quarter of each head rotated, biases
everywhere.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    PRE_NORM_RULES,
    attention,
    biases,
    layer_norm,
    layer_rules,
    mlp,
    stack,
    top_rules,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

RULES = (
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


def _describe(c: ConfigReader) -> Decoder:
    c.rename(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    attn = attention(c, partial=0.25, **biases(c, True))
    feed = mlp(c, act="gelu", gated=False, bias=True)
    is_parallel = c.flag("use_parallel_residual", True)
    block = Block(attn, feed, layer_norm(c), parallel="two_norms" if is_parallel else "no")
    return stack(c, block)


FAMILY = Family(
    ("GPTNeoXForCausalLM",),
    _describe,
    RULES,
    prefix="gpt_neox.",
    # causal masks and frequencies that old files carry
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
