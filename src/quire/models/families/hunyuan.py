"""Hunyuan, dense: Llama with norms over each query and key head after their rotation."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    context_of,
    head_dim_of,
    layer_rules,
    mlp,
    rms,
    stack,
)
from quire.models.positions import Rope
from quire.models.rope_config import read_rope
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder

HUNYUAN_RULES = (
    *layer_rules(
        {"self_attn.query_layernorm": "attn.q_norm", "self_attn.key_layernorm": "attn.k_norm"}
    ),
    *RULES,
)


def hunyuan_attention(c: ConfigReader) -> Attention:
    """The attention of the dense models and of the mixtures."""
    c.only("use_qk_norm", True)
    c.only("use_rotary_pos_emb", True)
    c.only("use_cla", False)
    dim = head_dim_of(c)
    c.only("attention_head_dim", dim)
    return attention(
        c,
        head_dim=dim,
        rope=_rope(c, dim),
        qk_norm=rms(c, 1e-5),
        qk_norm_after_rope=True,
        **biases(c),
    )


def _rope(c: ConfigReader, dim: int) -> Rope:
    """Files call a base that `alpha` has stretched once and for all a dynamic scaling."""
    old = c.section("rope_scaling")
    section = old if old is not None else c.section("rope_parameters")
    if section is None or "alpha" not in section:
        return read_rope(c, dim, context=context_of(c))
    section.only("type", "dynamic")
    section.only("rope_type", "dynamic")
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        section.raw(key, None)  # without meaning next to alpha, as in transformers
    theta = section.number("rope_theta", c.number("rope_theta", 1e4))
    # the exponent with which the slowest frequency is divided by alpha and the fastest stays
    theta *= section.number("alpha") ** (dim / (dim - 2))
    return Rope(theta, dim)


def check_original_keys(c: ConfigReader) -> None:
    """Keys of the published files that say what the family is, or nothing about its decoder."""
    c.only("norm_type", "hf_rms", "rms")
    c.only("mlp_bias", False)
    c.only("position_embedding_xdrope", False)
    c.only("add_classification_head", False)
    c.only("cla_share_factor", 1, 2)  # of attention shared between layers, which is off
    # of the classification head, and of training
    c.ignore("class_num", "pool_type", "dense_list", "enable_lm_head_fp32", "org_vocab_size")
    marks = ("pad_id", "mask_init_id", "im_start_id", "im_end_id", "im_newline_id")
    c.ignore(*marks, "text_start_id", "text_end_id")


def _describe(c: ConfigReader) -> Decoder:
    check_original_keys(c)
    return stack(c, Block(hunyuan_attention(c), mlp(c), rms(c, 1e-5)))


FAMILY = Family(("HunYuanDenseV1ForCausalLM",), _describe, HUNYUAN_RULES)
