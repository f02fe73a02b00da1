"""GPT-2: learned positions, layer norms, biases everywhere, and weights stored input first."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import mlp, num_layers_of, top_rules
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Norm

_STORED, _OURS = "{prefix}h.{layer}.", "layers.{layer}."
_QKV = [f"{_OURS}attn.{part}." for part in "qkv"]
RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    rule(_STORED + "ln_1.{leaf}", _OURS + "attn_pre.{leaf}"),
    rule(_STORED + "ln_2.{leaf}", _OURS + "mlp_pre.{leaf}"),
    rule(
        _STORED + "attn.c_attn.weight", *(p + "weight" for p in _QKV), steps=("transpose", "split")
    ),
    rule(_STORED + "attn.c_attn.bias", *(p + "bias" for p in _QKV), steps=("split",)),
    *(
        form
        for stored, ours in (
            ("attn.c_proj.", "attn.o."),
            ("mlp.c_fc.", "mlp.up."),
            ("mlp.c_proj.", "mlp.down."),
        )
        for form in (
            rule(_STORED + stored + "weight", _OURS + ours + "weight", steps=("transpose",)),
            rule(_STORED + stored + "bias", _OURS + ours + "bias"),
        )
    ),
)


def _describe(c: ConfigReader) -> Decoder:
    c.only("n_ctx", c.integer("n_positions"))
    c.only("add_cross_attention", False)
    width, heads, depth = c.integer("n_embd"), c.integer("n_head"), num_layers_of(c, "n_layer")
    if width % heads:
        raise unsupported("n_head", heads, f"a divisor of n_embd={width}")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    inner = c.integer("n_inner", 4 * width)
    feed = mlp(
        c, width=inner, act_key="activation_function", act="gelu_new", gated=False, bias=True
    )
    blocks = [Block(_attention(c, width // heads, i), feed, norm) for i in range(depth)]
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=width,
        blocks=tuple(blocks),
        final_norm=norm,
        context=c.integer("n_positions"),
        learned_positions=c.integer("n_positions"),
        tie=c.flag("tie_word_embeddings", True),
    )


def _attention(c: ConfigReader, head_dim: int, layer: int) -> Attention:
    heads = c.integer("n_head")
    scale = head_dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    if c.flag("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return Attention(heads, heads, head_dim, scale, qkv_bias=True, o_bias=True)


FAMILY = Family(
    ("GPT2LMHeadModel",),
    _describe,
    RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks that old files carry
)
