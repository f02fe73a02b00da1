"""GPT-NeoX Japanese: GPT-NeoX in sequential blocks without biases but that of the last attention's
output.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.gpt_neox import RULES
from quire.models.families.llama import LAYER, attention, layer_norm, mlp, num_layers_of, stack
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.rename(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    c.only("is_decoder", False, True)  # which changes nothing
    width = c.integer("hidden_size") * c.integer("intermediate_multiple_size", 4)
    feed = mlp(c, width=width, act="gelu", gated=False)
    block = Block(attention(c), feed, layer_norm(c))
    *first, last = [block] * num_layers_of(c)
    assert isinstance(last.mixer, Attention)
    last = replace(last, mixer=replace(last.mixer, o_bias=True))
    return stack(c, [*first, last], tie=c.flag("tie_word_embeddings", True))


FAMILY = Family(
    ("GPTNeoXJapaneseForCausalLM",),
    _describe,
    (rule(LAYER + "attention.dense_bias", "layers.{layer}.attn.o.bias"), *RULES),
    prefix="gpt_neox_japanese.",
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
