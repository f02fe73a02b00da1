"""Phi 1 to 4, and Phi-3.5-MoE."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ATTENTION_RULES,
    PRE_NORM_RULES,
    RULES,
    attention,
    biases,
    layer_norm,
    layer_rules,
    mlp,
    rms,
    stack,
    top_rules,
    window_of,
)
from quire.models.families.mixtures import expert_rules, experts_of, router_rule
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm

PHI_RULES = (
    *top_rules("embed_tokens", "final_layernorm"),
    *layer_rules(
        {
            "self_attn.dense": "attn.o",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        }
    ),
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
)


def _describe_phi(c: ConfigReader) -> Decoder:
    """Phi 1, 1.5 and 2: parallel blocks, one layer norm, partial rotation, biases everywhere."""
    c.only("tie_word_embeddings", False)
    norm = layer_norm(c)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("qk_layernorm", False) else None,
        qkv_bias=True,
        o_bias=True,
    )
    feed = mlp(c, act="gelu_new", gated=False, bias=True)
    return stack(c, Block(attn, feed, norm, parallel="one_norm"), head_bias=True)


PHI = Family(("PhiForCausalLM",), _describe_phi, PHI_RULES)


_FUSED_RULES = layer_rules(
    {"self_attn.qkv_proj": "attn.q attn.k attn.v", "mlp.gate_up_proj": "mlp.gate mlp.up"}
)


def _describe_phi3(c: ConfigReader) -> Decoder:
    """Phi-3, 3.5 and 4: Llama with fused q, k and v, gate and up, and LongRoPE."""
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.only(bias, False)
    for factor in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini: only 1 has a meaning
        c.only(factor, 1)
    original = c.integer("original_max_position_embeddings", 4096)
    scalings = {"kinds": ("default", "longrope"), "original": original}
    attn = attention(c, rope_facts=scalings, window=window_of(c))
    return stack(c, Block(attn, mlp(c), rms(c, 1e-5)))


PHI3 = Family(("Phi3ForCausalLM",), _describe_phi3, _FUSED_RULES + RULES)


_AT = "block_sparse_moe."
_RULES = (router_rule(_AT + "gate"), *expert_rules(_AT + "experts", ("w1", "w3", "w2")), *RULES)


def _describe_phimoe(c: ConfigReader) -> Decoder:
    """Phi-3.5-MoE: layer norms and biases around Mixtral's experts, which SparseMixer chooses.

    Contexts beyond the original length take LongRoPE's long divisors with their own factor, as the
    model was trained; transformers changes only the factor.
    """
    original = c.integer("original_max_position_embeddings", None)
    scalings = {"kinds": ("default", "longrope"), "original": original}
    attn = attention(c, theta=1e6, rope_facts=scalings, window=window_of(c), **biases(c))
    c.raw("input_jitter_noise", None)  # in training
    moe = experts_of(
        c,
        "num_local_experts",
        width=c.integer("intermediate_size"),
        score="sparsemixer",
        renorm=False,
        jitter=c.number("router_jitter_noise", 0.01),
    )
    if moe.top_k != 2:
        raise unsupported("num_experts_per_tok", moe.top_k, "2, as SparseMixer chooses")
    norm = Norm("layer", c.number("rms_norm_eps", 1e-5), bias=True)
    return stack(c, Block(attn, moe, norm), head_bias=c.flag("lm_head_bias", False))


PHIMOE = Family(("PhimoeForCausalLM", "PhiMoEForCausalLM"), _describe_phimoe, _RULES)
