"""MiniMax-M2: norms over the full width of queries and keys, part of each head rotated, Mixtral's
experts chosen by sigmoids and a bias.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import RULES, attention, head_dim_of, rms, stack
from quire.models.families.mixtures import expert_rules, experts_of, router_rule, select_bias_rule
from quire.models.rules import Family
from quire.models.spec import Block, Decoder

_AT = "block_sparse_moe."
_RULES = (
    router_rule(_AT + "gate"),
    select_bias_rule(_AT + "e_score_correction_bias"),
    *expert_rules(_AT + "experts", ("w1", "w3", "w2")),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    norm, dim = rms(c, 1e-6), head_dim_of(c, 128)
    _refuse_other_forms(c)
    # how much of a head is rotated
    rotated = c.integer("rotary_dim", dim, minimum=2, maximum=dim)
    attn = attention(
        c, head_dim=dim, theta=5e6, partial=rotated / dim, qk_norm=norm, qk_norm_over="full"
    )
    moe = experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="sigmoid",
        select_bias=True,
    )
    return stack(c, Block(attn, moe, norm))


def _refuse_other_forms(c: ConfigReader) -> None:
    """Keys of the released files that other models of this maker use."""
    c.only("scoring_func", "sigmoid")
    c.only("use_routing_bias", True)
    c.only("use_qk_norm", True)
    c.only("qk_norm_type", "per_layer")
    c.only("shared_intermediate_size", 0)
    c.only("sliding_window", None)
    for part in ("full_attention", "linear_attention", "mlp"):
        c.only(f"layernorm_{part}_beta", 1.0)
    types = c.raw("attn_type_list", [])
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise unsupported("attn_type_list", types, "1 for every layer")
    # of shared experts and dense layers, of which there are none
    c.ignore("shared_moe_mode", "mlp_intermediate_size")
    # heads that predict further tokens are left out
    c.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")


FAMILY = Family(("MiniMaxM2ForCausalLM",), _describe, _RULES)
