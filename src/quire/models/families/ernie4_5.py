"""ERNIE 4.5, dense: Llama with neighbours rotated and one switch for all biases; in PaddleOCR-VL
with halves rotated by places on three axes.
"""

from __future__ import annotations

from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.families.glm import with_axes
from quire.models.families.llama import RULES, attention, head_dim_of, mlp, rms, stack
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder


def ernie_attention(
    c: ConfigReader, head_dim: int | None, *, interleaved: bool = True
) -> Attention:
    """The attention of the dense models and of the mixtures; `head_dim` is the default."""
    dim, bias = head_dim_of(c, head_dim), c.flag("use_bias", False)
    return attention(
        c, head_dim=dim, theta=5e5, interleaved=interleaved, qkv_bias=bias, o_bias=bias
    )


def _describe(c: ConfigReader, *, in_vl: bool = False) -> Decoder:
    c.only("compression_ratio", 1.0)
    feed = mlp(c, bias=c.flag("use_bias", False))
    attn = ernie_attention(c, 128, interleaved=not in_vl)
    if in_vl:
        attn = with_axes(attn, (16, 24, 24))
    block = Block(attn, feed, rms(c, 1e-5))
    return stack(c, block, tie=c.flag("tie_word_embeddings", True))


FAMILY = Family(("Ernie4_5ForCausalLM",), _describe, RULES)
IN_VL = Family(("PaddleOCRTextModel",), partial(_describe, in_vl=True), RULES)
