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
    read_flags,
    read_layer_types,
    rms,
    stack,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import DEEPSEEK_RULES, deepseek_experts_of, sparse_by_type
from quire.models.positions import Rope
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder

_RULES = (
    rule(LAYER + "self_attn.attention_sink_bias", "layers.{layer}.attn.sinks"),
    *DEEPSEEK_RULES,
    *RULES,
)
# of a head of 192 values: 64, once cut to a whole number
_ROTATED = 0.334


def _describe(c: ConfigReader) -> Decoder:
    layers, dim = range(num_layers_of(c)), head_dim_of(c, 192)
    c.rename(rms_norm_eps="layernorm_epsilon")
    slides = read_flags(c, "hybrid_layer_pattern", [i > 0 and (i + 1) % 6 != 0 for i in layers])
    kinds = read_layer_types(c, lambda layer: slides[layer])
    norm, window = rms(c, 1e-5), _window(c)
    bases = {
        "full_attention": c.number("rope_theta", 5e6),
        "sliding_attention": c.number("swa_rope_theta", 1e4),
    }
    partial = c.number("partial_rotary_factor", _ROTATED, maximum=1.0)
    ropes = read_ropes(c, dim, bases, context=context_of(c), partial=partial)
    sparse = sparse_by_type(c, read_flags(c, "moe_layer_freq", [i > 0 for i in layers]))
    dense, experts = mlp(c), deepseek_experts_of(c, shared="n_shared_experts")
    blocks = []
    for kind, is_sparse in zip(kinds, sparse, strict=True):
        attn = _attention(c, dim, kind, ropes[kind])
        block = Block(attn, experts if is_sparse else dense, norm)
        blocks += with_windows(block, [kind], window)
    # attention is linear in its values, so the factor goes into their weights
    scale = c.number("attention_value_scale", 1.0)
    scales = (("attn.v.weight", scale), ("attn.v.bias", scale))
    return stack(c, blocks, leaf_scales=scales)


def _window(c: ConfigReader) -> int | None:
    """`sliding_window` counts the token itself; the published `sliding_window_size` does not."""
    c.raw("attention_chunk_size", None)  # in published files, of nothing
    c.only("hybrid_block_size", None)
    size: int | None = c.integer("sliding_window_size", None)
    if size is None:
        return window_of(c, 129)
    c.only("sliding_window", size, size + 1)
    return size + 1


def _attention(c: ConfigReader, dim: int, kind: str, rope: Rope) -> Attention:
    """Sliding layers have numbers of their own in published files."""
    heads, kv_heads = c.integer("num_attention_heads"), c.integer("num_key_value_heads", 4)
    value_dim = c.integer("v_head_dim", 128, maximum=dim)
    is_sliding, has_sinks = kind == "sliding_attention", "add_full_attention_sink_bias"
    if is_sliding:
        has_sinks = "add_swa_attention_sink_bias"
        kv_heads = c.integer("swa_num_key_value_heads", 2 * kv_heads)
        c.only("swa_num_attention_heads", heads)
        c.only("swa_head_dim", dim)
        c.only("swa_v_head_dim", value_dim)
    if heads % kv_heads:
        raise unsupported("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    return attention(
        c,
        head_dim=dim,
        kv_heads=kv_heads,
        rope=rope,
        qkv_bias=c.flag("attention_bias", False),
        sinks=c.flag(has_sinks, is_sliding),
        value_dim=None if value_dim == dim else value_dim,
    )


FAMILY = Family(("MiMoV2FlashForCausalLM",), _describe, _RULES, ignored=(r"mtp\..*",))
