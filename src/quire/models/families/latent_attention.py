"""Multi-head latent attention as config.json describes it: what its families have in common."""

from __future__ import annotations

import math
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, context_of, layer_rules
from quire.models.positions import Rope
from quire.models.rope_config import only_section, read_rope
from quire.models.spec import LatentAttention, Norm

LATENT_RULES = RULES + layer_rules(
    {
        "self_attn.q_a_proj": "attn.q_a",
        "self_attn.q_a_layernorm": "attn.q_a_norm",
        "self_attn.q_b_proj": "attn.q_b",
        "self_attn.kv_a_proj_with_mqa": "attn.kv_a",
        "self_attn.kv_a_layernorm": "attn.kv_a_norm",
        "self_attn.kv_b_proj": "attn.kv_b",
    }
)


def latent_attention(
    c: ConfigReader,
    *,
    interleaved: bool | None = None,
    ropes: tuple[str, ...] = ("default", "yarn"),
    q_rank: int | None = 1536,
    rank: int = 512,
    unrotated: int = 128,
    rotated: int = 64,
    value_dim: int = 128,
    theta: float = 1e4,
    without_rope: bool = False,
    head_dim_key: str | None = "head_dim",
    has_share: bool = False,
) -> LatentAttention:
    """The attention of all layers; sizes are what absent keys mean to the family, or else to
    DeepSeek's. `interleaved` None: `rope_interleave` says it. `ropes` are the scalings that the
    family may have, `theta` its base. `head_dim_key`: a key that only repeats the rotated part.
    has_share: configs also have that part as a share of a whole head.
    """
    if interleaved is None and not without_rope:
        interleaved = c.flag("rope_interleave", True)
    heads = c.integer("num_attention_heads")
    c.only("num_key_value_heads", heads)  # whose latent they share
    unrotated = c.integer("qk_nope_head_dim", unrotated)
    rotated = c.integer("qk_rope_head_dim", rotated)
    c.only("qk_head_dim", unrotated + rotated)
    if head_dim_key is not None and not without_rope:
        c.only(head_dim_key, rotated)
    has_q_rank = c.bound("q_lora_rank", q_rank) is not None
    bias = c.flag("attention_bias", False)
    # the one query projection that a model without a rank has is without bias in transformers,
    # whatever the key says
    if bias and not has_q_rank:
        raise unsupported("attention_bias", True, "false where q_lora_rank is null")
    return LatentAttention(
        heads=heads,
        rank=c.integer("kv_lora_rank", rank),
        unrotated=unrotated,
        rotated=rotated,
        value_dim=c.integer("v_head_dim", value_dim),
        scale=(unrotated + rotated) ** -0.5 if without_rope else _scale(c, unrotated + rotated),
        norm=Norm("rms", 1e-6),  # whatever rms_norm_eps is
        q_rank=c.integer("q_lora_rank", q_rank) if has_q_rank else None,
        rope=None
        if without_rope
        else _rope(c, rotated, bool(interleaved), ropes, theta, unrotated if has_share else 0),
        bias=bias,
        o_bias=bias,
    )


def _rope(
    c: ConfigReader,
    rotated: int,
    interleaved: bool,
    kinds: tuple[str, ...],
    theta: float,
    unrotated: int,
) -> Rope:
    whole = rotated + unrotated
    partial = rotated / whole
    rope = read_rope(c, whole, context=context_of(c), kinds=kinds, theta=theta, partial=partial)
    if rope.dim != rotated:
        raise unsupported("partial_rotary_factor", rope.dim / rotated, "1")
    return Rope(rope.theta, rope.dim, rope.scaling, interleaved, rope.axes)


def _scale(c: ConfigReader, head_dim: int) -> float:
    """The scale of scores: YaRN's factor for all dimensions belongs to queries and keys
    (DeepSeek-V2).
    """
    section: Any = only_section(c)
    scale = head_dim**-0.5
    weight = None if section is None else section.number("mscale_all_dim", None, minimum=0.0)
    if not weight:
        return scale
    factor = section.number("factor")
    return scale * (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2
