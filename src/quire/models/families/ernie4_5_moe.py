"""ERNIE 4.5 with experts: neighbours rotated, softmax routing with a bias for the choice, shared
experts as one.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.ernie4_5 import ernie_attention
from quire.models.families.llama import RULES, mlp, num_layers_of, rms, stack
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    shared_expert,
    shared_rules,
    with_experts,
)
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Moe

_BIAS_RULE = rule(
    "{prefix}layers.{layer}.mlp.moe_statics.e_score_correction_bias",
    "layers.{layer}.mlp.select_bias",
    # the file has the bias as a matrix of one row
    steps=("row",),
)


def _describe(c: ConfigReader) -> Decoder:
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


FAMILY = Family(
    ("Ernie4_5_MoeForCausalLM",),
    _describe,
    RULES + QWEN_RULES + shared_rules("mlp.shared_experts") + (_BIAS_RULE,),
    ignored=(r"mtp_.*",),
)
