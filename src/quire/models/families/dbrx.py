"""DBRX: bounded queries, keys and values, layer norms without bias, experts one after the other."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, most_experts, num_layers_of, top_rules
from quire.models.rope_config import LEAST_THETA, read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Activation, Attention, Block, Decoder, Moe, Norm

_STORED, _OURS = "{prefix}blocks.{layer}.", "layers.{layer}."
_EXPERTS, _EXPERT = _STORED + "ffn.experts.mlp.", _OURS + "mlp.experts.{expert}."
RULES = (
    *top_rules("wte", "norm_f"),
    rule(_STORED + "norm_attn_norm.norm_1.weight", _OURS + "attn_pre.weight"),
    rule(_STORED + "norm_attn_norm.norm_2.weight", _OURS + "mlp_pre.weight"),
    rule(
        _STORED + "norm_attn_norm.attn.Wqkv.weight",
        *(f"{_OURS}attn.{part}.weight" for part in "qkv"),
        steps=("split",),
    ),
    rule(_STORED + "norm_attn_norm.attn.out_proj.weight", _OURS + "attn.o.weight"),
    rule(_STORED + "ffn.router.layer.weight", _OURS + "mlp.router.weight"),
    rule(_EXPERTS + "w1", _EXPERT + "gate.weight", steps=("stacked", "joined")),
    rule(_EXPERTS + "v1", _EXPERT + "up.weight", steps=("stacked", "joined")),
    rule(_EXPERTS + "w2", _EXPERT + "down.weight", steps=("transpose", "stacked", "joined")),
)


def _describe(c: ConfigReader) -> Decoder:
    # no key says epsilon: transformers leaves it at the default of torch
    norm = Norm("layer", 1e-5)
    block = Block(_attention(c), _experts(c), norm)
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=c.integer("d_model"),
        blocks=(block,) * num_layers_of(c, "n_layers"),
        final_norm=norm,
        context=c.integer("max_seq_len"),
        tie=c.flag("tie_word_embeddings", False),
    )


def _attention(c: ConfigReader) -> Attention:
    part = c.subconfig("attn_config")
    width, heads = c.integer("d_model"), c.integer("n_heads")
    kv_heads = part.integer("kv_n_heads", 1)
    c.only("num_key_value_heads", kv_heads)
    if width % heads or heads % kv_heads:
        allowed = f"a divisor of d_model={width} and a multiple of kv_n_heads={kv_heads}"
        raise unsupported("n_heads", heads, allowed)
    dim = width // heads
    theta = part.number("rope_theta", 1e4, minimum=LEAST_THETA)
    rope = read_rope(c, dim, theta=theta, context=c.integer("max_seq_len"))
    # `rope_parameters` may say another base than `attn_config`, and nothing says which one is right
    part.only("rope_theta", rope.theta)
    return Attention(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        rope=rope,
        clip=part.number("clip_qkv", None),
    )


def _experts(c: ConfigReader) -> Moe:
    part = c.subconfig("ffn_config")
    part.only("hidden_size", c.integer("d_model"))
    norm = part.bound("moe_normalize_expert_weights", 1.0)
    # the key is the order of the norm that divides the weights: only of order 1 do they sum to 1
    part.only("moe_normalize_expert_weights", 1)
    part.only("uniform_expert_assignment", False)
    experts = part.integer("moe_num_experts", 4, maximum=most_experts(c, "n_layers"))
    return Moe(
        experts=experts,
        top_k=part.integer("moe_top_k", 1, maximum=experts),
        width=part.integer("ffn_hidden_size", 3584),
        act=_activation(part),
        renorm=norm is not None,
    )


def _activation(part: ConfigReader) -> Activation:
    act = part.section("ffn_act_fn")
    if act is None:
        return "silu"
    name: Activation = act.choice("name", ACTIVATIONS, "silu")
    return name


FAMILY = Family(("DbrxForCausalLM",), _describe, RULES, prefix="transformer.")
