"""StarCoder2: Llama's attention with layer norms, biases and a plain gelu feed-forward part."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, layer_rules, mlp, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm

_RULES = (*layer_rules({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}), *RULES)


def _describe(c: ConfigReader) -> Decoder:
    c.only("mlp_type", "default")
    c.only("norm_type", "layer_norm")
    bias = c.flag("use_bias", True)
    window = window_of(c)
    attn = attention(c, window=window, qkv_bias=bias, o_bias=bias)
    feed = mlp(c, act="gelu_pytorch_tanh", gated=False, bias=bias)
    norm = Norm("layer", c.number("norm_epsilon", 1e-5), bias=True)
    return stack(c, Block(attn, feed, norm), tie=c.flag("tie_word_embeddings", True))


FAMILY = Family(("Starcoder2ForCausalLM",), _describe, _RULES)
