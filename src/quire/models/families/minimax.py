"""MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention in every eighth layer,
experts, and residual sums that are weighed and normed.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    ATTENTION_RULES,
    attention,
    layer_rules,
    num_layers_of,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mixtures import expert_rules, experts_of, router_rule
from quire.models.mixers.recurrent.spec import Lightning
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder

_FULL, _LINEAR = "full_attention", "linear_attention"


def _describe(c: ConfigReader) -> Decoder:
    c.only("sliding_window", None)
    depth, norm = num_layers_of(c), rms(c, 1e-5)
    attn = attention(c, theta=1e6)
    alpha, beta = (_factor(c, which) for which in ("alpha", "beta"))
    # The stream is what the norms give: x = norm(alpha * x + beta * f(x)), of which only epsilon
    # shows the size.
    summed = replace(norm, eps=norm.eps / alpha**2)
    moe = experts_of(c, "num_local_experts", width=c.integer("intermediate_size"))
    c.ignore("block_size")  # of the sums in which a state is computed
    blocks = []
    for layer, kind in enumerate(_kinds(c)):
        # decays fall with the depth; the two 1e-5 are those of transformers, which keep the last
        # from 0
        slope = 1 - layer / (depth - 1 + 1e-5) + 1e-5
        lightning = Lightning(attn.heads, attn.head_dim, slope, 1e-6, act=moe.act)
        mixer = attn if kind == _FULL else lightning
        blocks.append(Block(mixer, moe, summed, residual_scale=beta / alpha, norms_sum=True))
    # the embedding is not a sum, so its epsilon stays; the last sum's norm is the final one
    return stack(c, blocks, embed_norm=norm, final_norm=None)


def _factor(c: ConfigReader, which: str) -> float:
    """One for all sums: what a layer's sum hands on is normed before the next."""
    keys = [f"{part}_{which}_factor" for part in ("mlp", "full_attn", "linear_attn")]
    first, *others = (float(c.number(key, 1.0)) for key in keys)
    for key, value in zip(keys[1:], others, strict=True):
        if value != first:
            raise unsupported(key, value, f"the same as {keys[0]}={first:g}")
    return first


def _kinds(c: ConfigReader) -> list[str]:
    """`layer_types`, or `attn_type_list` of the first files: 1 is softmax attention."""
    depth = num_layers_of(c)
    usual = [_LINEAR if i % 2 else _FULL for i in range(depth)]
    listed = c.raw("attn_type_list", None)
    if listed is not None:
        if not isinstance(listed, list) or set(listed) - {0, 1}:
            raise unsupported("attn_type_list", listed, "0 or 1 for each layer")
        usual = [_FULL if kind else _LINEAR for kind in listed]
    return read_kinds(c, "layer_types", (_FULL, _LINEAR), usual)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    """A layer's norm of its input is that of the sum before it."""
    depth = len(decoder.blocks)
    norms = [rule("{prefix}layers.0.input_layernorm.{leaf}", "embed_norm.{leaf}")]
    for layer in range(1, depth):
        source = f"{{prefix}}layers.{layer}.input_layernorm.{{leaf}}"
        norms.append(rule(source, f"layers.{layer - 1}.mlp_post.{{leaf}}"))
    return (
        *norms,
        rule("{prefix}norm.{leaf}", f"layers.{depth - 1}.mlp_post.{{leaf}}"),
        rule("{prefix}embed_tokens.{leaf}", "embed.{leaf}"),
        rule("lm_head.{leaf}", "head.{leaf}"),
        *layer_rules({"post_attention_layernorm": "attn_post"}),
        *layer_rules({"self_attn.qkv_proj": "mixer.q mixer.k mixer.v"}, step="by_head"),
        *layer_rules(
            {
                "self_attn.output_gate": "mixer.z",
                "self_attn.out_proj": "mixer.out",
                "self_attn.norm": "mixer.norm",
            }
        ),
        *ATTENTION_RULES,
        router_rule("block_sparse_moe.gate"),
        *expert_rules("block_sparse_moe.experts", ("w1", "w3", "w2")),
    )


FAMILY = Family(
    ("MiniMaxForCausalLM",),
    _describe,
    _rules,
    # numbers that follow from the heads
    ignored=(r"layers\.\d+\.self_attn\.((query|key|diagonal)_decay|slope_rate)",),
)
