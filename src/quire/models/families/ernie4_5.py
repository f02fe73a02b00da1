"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from functools import partial

from quire.models.config_reader import ConfigReader
from quire.models.families.glm import with_axes
from quire.models.families.llama import (
    RULES,
    attention,
    head_dim_of,
    mlp,
    num_layers_of,
    rms,
    stack,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    shared_expert,
    shared_rules,
    with_experts,
)
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Moe


def ernie_attention(
    c: ConfigReader, head_dim: int | None, *, interleaved: bool = True
) -> Attention:
    """The attention of the dense models and of the mixtures; `head_dim` is the default."""
    dim, bias = head_dim_of(c, head_dim), c.flag("use_bias", False)
    return attention(
        c, head_dim=dim, theta=5e5, interleaved=interleaved, qkv_bias=bias, o_bias=bias
    )


def _describe_ernie4_5(c: ConfigReader, *, in_vl: bool = False) -> Decoder:
    """ERNIE 4.5, dense: Llama with neighbours rotated and one switch for all biases; within
    PaddleOCR-VL with halves rotated by places on three axes.
    """
    c.only("compression_ratio", 1.0)
    feed = mlp(c, bias=c.flag("use_bias", False))
    attn = ernie_attention(c, 128, interleaved=not in_vl)
    if in_vl:
        attn = with_axes(attn, (16, 24, 24))
    block = Block(attn, feed, rms(c, 1e-5))
    return stack(c, block, tie=c.flag("tie_word_embeddings", True))


ERNIE4_5 = Family(("Ernie4_5ForCausalLM",), _describe_ernie4_5, RULES)
ERNIE4_5_IN_VL = Family(("PaddleOCRTextModel",), partial(_describe_ernie4_5, in_vl=True), RULES)


_BIAS_RULE = rule(
    "{prefix}layers.{layer}.mlp.moe_statics.e_score_correction_bias",
    "layers.{layer}.mlp.select_bias",
    # the file has the bias as a matrix of one row
    steps=("row",),
)


def _describe_ernie4_5_moe(c: ConfigReader) -> Decoder:
    """ERNIE 4.5 with experts: rotated neighbours, softmax with a bias for choices, shared ones."""
    bias = c.flag("use_bias", False)
    c.only("use_rmsnorm", True)
    c.only("compression_ratio", 1.0)
    c.raw("num_nextn_predict_layers", None)  # their tensors are left out
    dense = Block(ernie_attention(c, None), mlp(c, bias=bias), rms(c, 1e-5))
    blocks = with_experts(dense, _experts(c, bias), _is_sparse(c))
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True), head_bias=bias)


def _experts(c: ConfigReader, bias: bool) -> Moe:
    c.only("moe_use_aux_free", True)
    c.only("moe_gate", "top2_fused", "topk")
    c.ignore("moe_capacity", "moe_aux_loss_lambda", "moe_group")  # of training
    width = c.integer("moe_intermediate_size")
    num_shared = c.integer("moe_num_shared_experts", 2, minimum=0)
    return experts_of(
        c,
        "moe_num_experts",
        "moe_k",
        width=width,
        renorm_min=c.number("moe_norm_min", 1e-12),
        select_bias=True,
        wide_router=True,
        shared=shared_expert(c, width * num_shared, bias=bias) if num_shared else None,
    )


def _is_sparse(c: ConfigReader) -> list[bool]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`."""
    depth, every = num_layers_of(c), c.integer("moe_layer_interval", 1)
    first = c.integer("moe_layer_start_index", 1, minimum=0)
    last = c.integer("moe_layer_end_index", -1, minimum=-1, maximum=depth - 1)
    last = depth - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % every == 0 for i in range(depth)]


ERNIE4_5_MOE = Family(
    ("Ernie4_5_MoeForCausalLM",),
    _describe_ernie4_5_moe,
    RULES + QWEN_RULES + shared_rules("mlp.shared_experts") + (_BIAS_RULE,),
    ignored=(r"mtp_.*",),
)
