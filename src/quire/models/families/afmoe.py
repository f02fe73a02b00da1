"""AFMoE (Trinity): gated attention with windows and rotations in three of four layers, norms before
and after the parts, experts chosen by sigmoids and a bias next to shared ones.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    layer_rules,
    mlp,
    norm_rules,
    num_layers_of,
    rms,
    sliding_blocks,
    stack,
    window_of,
)
from quire.models.families.mixtures import (
    expert_rules,
    experts_of,
    router_rule,
    select_bias_rule,
    shared_expert,
    shared_rules,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder

_RULES = (
    *norm_rules(
        attn_pre="input_layernorm",
        attn_post="post_attention_layernorm",
        mlp_pre="pre_mlp_layernorm",
        mlp_post="post_mlp_layernorm",
    ),
    *layer_rules({"self_attn.gate_proj": "attn.gate"}),
    router_rule("mlp.router.gate"),
    select_bias_rule("mlp.expert_bias"),
    *expert_rules("mlp.experts"),
    *shared_rules("mlp.shared_experts"),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    c.ignore("load_balance_coeff", "num_expert_groups", "num_limited_groups")
    norm = rms(c, 1e-5, "rms_late_cast")
    attn = attention(c, usual_dim=128, qk_norm=norm, gate="full", **biases(c))
    every = c.integer("global_attn_every_n_layers", 4)
    block = Block(attn, mlp(c), norm, post=True)
    blocks = sliding_blocks(c, block, lambda i: (i + 1) % every, window_of(c, 1024))
    depth = num_layers_of(c)
    num_dense = c.integer("num_dense_layers", 1, minimum=0, maximum=depth)
    width, num_shared = c.integer("moe_intermediate_size"), c.integer("num_shared_experts", 2)
    moe = experts_of(
        c,
        "num_experts",
        score="sigmoid",
        scale=c.number("route_scale", 1.0),
        select_bias=True,
        shared=shared_expert(c, width * num_shared),
    )
    blocks = with_experts(blocks, moe, [layer >= num_dense for layer in range(depth)])
    is_scaled = c.flag("mup_enabled", False)
    return stack(
        c,
        [_rotated_where_local(block) for block in blocks],
        embed_scale=c.integer("hidden_size") ** 0.5 if is_scaled else 1.0,
    )


def _rotated_where_local(block: Block) -> Block:
    assert isinstance(block.mixer, Attention), "attention in every layer"
    is_local = block.mixer.window is not None
    return block if is_local else replace(block, mixer=replace(block.mixer, rope=None))


FAMILY = Family(("AfmoeForCausalLM",), _describe, _RULES)
