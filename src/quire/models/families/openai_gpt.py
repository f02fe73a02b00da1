"""GPT (2018): learned positions, norms after each sum, weights stored input first."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.gpt2 import RULES as GPT2_RULES
from quire.models.families.llama import num_layers_of
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

_STORED, _OURS = "{prefix}h.{layer}.", "layers.{layer}."
_RULES = (
    rule("{prefix}tokens_embed.weight", "embed.weight"),
    rule("{prefix}positions_embed.weight", "positions.weight"),
    rule(_STORED + "ln_1.{leaf}", _OURS + "attn_post.{leaf}"),
    rule(_STORED + "ln_2.{leaf}", _OURS + "mlp_post.{leaf}"),
    *GPT2_RULES,
)
# the "gelu" of this model's code is the approximation by tanh
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def _describe(c: ConfigReader) -> Decoder:
    c.rename(n_positions="max_position_embeddings")
    c.only("n_ctx", c.integer("n_positions"))
    c.ignore("n_special", "predict_special_tokens")
    width, heads = c.integer("n_embd"), c.integer("n_head")
    if width % heads:
        raise unsupported("n_head", heads, f"a divisor of n_embd={width}")
    dim = width // heads
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    attn = Attention(heads, heads, dim, dim**-0.5, qkv_bias=True, o_bias=True)
    feed = Mlp(4 * width, c.choice("afn", _ACTIVATIONS, "gelu"), gated=False, bias=True)
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=width,
        blocks=(Block(attn, feed, norm, norms_sum=True),) * num_layers_of(c, "n_layer"),
        final_norm=None,
        context=c.integer("n_positions"),
        learned_positions=c.integer("n_positions"),
        tie=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    ("OpenAIGPTLMHeadModel",),
    _describe,
    _RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.bias", "position_ids"),  # causal masks that old files carry
)
