"""MiMo-V2: values shorter than keys, sinks and twice the key/value heads in sliding layers, and
DeepSeek-V3's experts without a shared one.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    context_of,
    head_dim_of,
    mlp,
    num_layers_of,
    read_layer_types,
    rms,
    stack_of,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import DEEPSEEK_RULES, deepseek_experts_of, sparse_by_type
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Rope

_RULES = (
    rule(LAYER + "self_attn.attention_sink_bias", "layers.{layer}.attn.sinks"),
    *DEEPSEEK_RULES,
    *RULES,
)
_BASES = {"full_attention": 5e6, "sliding_attention": 1e4}
_ROTATED = 0.334


def _describe(c: ConfigReader) -> Decoder:
    depth, dim = num_layers_of(c), head_dim_of(c, 192)
    usual = [
        "sliding_attention" if i > 0 and (i + 1) % 6 else "full_attention" for i in range(depth)
    ]
    kinds, norm, window = read_layer_types(c, usual), rms(c, 1e-5), window_of(c, 129)
    ropes = read_ropes(c, dim, _BASES, context=context_of(c), partial=_ROTATED)
    sparse = sparse_by_type(c, [i > 0 for i in range(depth)])
    dense, experts = mlp(c), deepseek_experts_of(c, shared="n_shared_experts")
    blocks = []
    for kind, is_sparse in zip(kinds, sparse, strict=True):
        attn = _attention(c, dim, kind, ropes[kind])
        block = Block(attn, experts if is_sparse else dense, norm)
        blocks += with_windows(block, [kind], window)
    scale = c.number("attention_value_scale", 1.0)
    scales = (("attn.v.weight", scale), ("attn.v.bias", scale))
    return stack_of(c, blocks, leaf_scales=scales)


def _attention(c: ConfigReader, dim: int, kind: str, rope: Rope) -> Attention:
    heads, kv_heads = c.integer("num_attention_heads"), c.integer("num_key_value_heads", 4)
    is_sliding = kind == "sliding_attention"
    kv_heads *= 2 if is_sliding else 1
    if heads % kv_heads:
        raise unsupported("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    value_dim = c.integer("v_head_dim", 128, maximum=dim)
    return attention(
        c,
        head_dim=dim,
        kv_heads=kv_heads,
        rope=rope,
        qkv_bias=c.flag("attention_bias", False),
        sinks=is_sliding,
        value_dim=None if value_dim == dim else value_dim,
    )


FAMILY = Family(("MiMoV2FlashForCausalLM",), _describe, _RULES, ignored=(r"mtp\..*",))
