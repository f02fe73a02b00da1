"""Mellum: Qwen3's experts in the layers that the config says, windows with a rotation of their own
in some.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    mlp,
    num_layers_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import QWEN_RULES, experts_of, sparse_by_type, with_experts
from quire.models.rope_config import read_ropes
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_OF_DRAFTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
)
"""Keys of layers that predict further tokens, which are left out."""


def _describe(c: ConfigReader) -> Decoder:
    c.ignore(*_OF_DRAFTS)
    c.rename(num_experts="num_local_experts")
    norm = rms(c, 1e-6)
    dim = head_dim_of(c, 128)
    bases = {"full_attention": 5e5, "sliding_attention": 1e4}
    ropes = read_ropes(c, dim, bases, context=context_of(c))
    attn = attention(c, head_dim=dim, rope=None, qk_norm=norm, **biases(c))
    blocks = sliding_blocks(
        c, Block(attn, mlp(c), norm), lambda _: False, window_of(c, 1024), ropes
    )
    moe = experts_of(c, "num_experts", renorm=c.flag("norm_topk_prob", True))
    return stack(c, with_experts(blocks, moe, sparse_by_type(c, [True] * num_layers_of(c))))


FAMILY = Family(("MellumForCausalLM",), _describe, RULES + QWEN_RULES, ignored=(r"mtp\..*",))
