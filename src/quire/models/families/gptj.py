"""GPT-J and CodeGen."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    attention,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    stack,
    top_rules,
)
from quire.models.positions import Rope
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

RULES = (
    *top_rules("wte", "ln_f"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            **{f"attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "attn.out_proj": "attn.o",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
        },
        at="{prefix}h.{layer}.",
    ),
)


def _describe_gptj(c: ConfigReader) -> Decoder:
    """GPT-J: parallel blocks with one layer norm, neighbours rotated in the first values of each
    head, biases in the feed-forward part and the head.
    """
    c.rename(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    c.only("tie_word_embeddings", False)
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    dim = head_dim_of(c)
    turned = c.integer("rotary_dim", 64, minimum=2, maximum=dim)
    if turned % 2:
        raise unsupported("rotary_dim", turned, "an even number")
    # no key says the base, which is fixed in the model's code
    attn = attention(c, head_dim=dim, rope=Rope(1e4, turned, interleaved=True))
    width = c.integer("n_inner", 4 * c.integer("hidden_size"))
    block = Block(
        attn,
        mlp(c, width=width, act_key="activation_function", act="gelu_new", gated=False, bias=True),
        layer_norm(c, "layer_norm_epsilon"),
        parallel="one_norm",
    )
    return stack(c, block, head_bias=True)


GPTJ = Family(
    ("GPTJForCausalLM",),
    _describe_gptj,
    RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks that old files carry
)

_PARTS = 4
"""Parts in which the projections of CodeGen's published models were trained."""


def _describe_codegen(c: ConfigReader) -> Decoder:
    """CodeGen: GPT-J with queries, values and keys in one tensor of four parts."""
    decoder = _describe_gptj(c)
    c.integer("n_ctx", None)  # the context again
    heads = c.integer("num_attention_heads")
    if heads % _PARTS:
        raise unsupported("n_head", heads, f"a multiple of {_PARTS}")
    return decoder


CODEGEN = Family(
    ("CodeGenForCausalLM",),
    _describe_codegen,
    (
        *layer_rules(
            {"attn.qkv_proj": "attn.q attn.v attn.k"}, at="{prefix}h.{layer}.", step="by_quarter"
        ),
        *RULES,
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.causal_mask",),
)
