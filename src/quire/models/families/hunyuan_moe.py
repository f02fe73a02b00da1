"""Hunyuan-A13B: Hunyuan's attention, experts in every layer and a shared one."""

from __future__ import annotations

from quire.models.config_reader import LARGEST_SIZE, ConfigReader, unsupported
from quire.models.families.hunyuan import HUNYUAN_RULES, check_original_keys, hunyuan_attention
from quire.models.families.llama import ACTIVATIONS, most_experts, rms, stack
from quire.models.families.mixtures import expert_rules, router_rule, shared_expert, shared_rules
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Moe

RULES = (
    *HUNYUAN_RULES,
    router_rule("mlp.gate.wg"),
    *expert_rules("mlp.experts"),
    *shared_rules("mlp.shared_mlp"),
)


def _describe(c: ConfigReader) -> Decoder:
    check_original_keys(c)
    c.only("use_mixed_mlp_moe", True)
    c.only("moe_layer_num_skipped", 0)
    c.only("use_mla", False)
    c.only("group_limited_greedy", False)
    c.only("norm_topk_prob", True)
    c.only("routed_scaling_factor", False, 1.0)
    # of training
    c.ignore("moe_drop_tokens", "moe_random_routing_dropped_token", "num_media_embeds")
    return stack(c, Block(hunyuan_attention(c), _experts(c), rms(c, 1e-5)))


def _experts(c: ConfigReader) -> Moe:
    experts = _in_all_layers(c, "num_experts", maximum=most_experts(c))
    width = c.integer("intermediate_size")
    num_shared = _in_all_layers(c, "num_shared_expert", 1)
    return Moe(
        experts=experts,
        top_k=_in_all_layers(c, "moe_topk", 1, maximum=experts),
        width=_in_all_layers(c, "moe_intermediate_size", width),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
        wide_router=True,
        shared=shared_expert(c, width * num_shared),
    )


def _in_all_layers(
    c: ConfigReader, key: str, default: int | None = None, maximum: int = LARGEST_SIZE
) -> int:
    """A whole number, or a list that has the same one for every layer."""
    value = c.raw(key) if default is None else c.raw(key, default)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        allowed = f"an integer from 1 to {maximum}, the same for every layer"
        raise unsupported(key, value, allowed)
    return value


FAMILY = Family(("HunYuanMoEV1ForCausalLM",), _describe, RULES)
