"""The vocabulary of families with experts: weight rules and the keys of their routers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import ACTIVATIONS, num_experts_of, num_layers_of, read_kinds
from quire.models.rules import Rule, rule
from quire.models.spec import Block, Mlp, Moe

_AT, _OURS = "{prefix}layers.{layer}.", "layers.{layer}.mlp."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def router_rule(stored: str) -> Rule:
    """The rule of a router that the checkpoint calls `stored` within a layer."""
    return rule(f"{_AT}{stored}.{{leaf}}", _OURS + "router.{leaf}")


def select_bias_rule(stored: str) -> Rule:
    """The rule of the bias that joins the scores for the choice."""
    return rule(_AT + stored, _OURS + "select_bias")


def expert_rules(stored: str, names: tuple[str, str, str] = _PROJECTIONS) -> tuple[Rule, ...]:
    """The rules of experts with a tensor per projection; `names`: of gate, up and down."""
    return _rules_of(f"{_AT}{stored}.{{expert}}.", _OURS + "experts.{expert}.", names)


def stacked_expert_rules(stored: str) -> tuple[Rule, ...]:
    """The rules of experts with a tensor for all gates and ups, and one for all downs."""
    ours = _OURS + "experts.{expert}."
    return (
        rule(
            f"{_AT}{stored}.gate_up_proj",
            *(f"{ours}{part}.weight" for part in ("gate", "up")),
            steps=("stacked", "split"),
        ),
        rule(f"{_AT}{stored}.down_proj", ours + "down.weight", steps=("stacked",)),
    )


def shared_rules(stored: str) -> tuple[Rule, ...]:
    """The rules of a shared expert."""
    return _rules_of(f"{_AT}{stored}.", _OURS + "shared.", _PROJECTIONS)


def _rules_of(stored: str, ours: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    pairs = zip(names, ("gate", "up", "down"), strict=True)
    return tuple(rule(f"{stored}{n}.{{leaf}}", f"{ours}{part}.{{leaf}}") for n, part in pairs)


QWEN_RULES = (router_rule("mlp.gate"), *expert_rules("mlp.experts"))
DEEPSEEK_RULES = (
    *QWEN_RULES,
    select_bias_rule("mlp.gate.e_score_correction_bias"),
    *shared_rules("mlp.shared_experts"),
)


def experts_of(c: ConfigReader, key: str, top_k: str = "num_experts_per_tok", **facts: Any) -> Moe:
    """A mixture of `key` experts. Without `width` among the facts: `moe_intermediate_size`."""
    experts = num_experts_of(c, key)
    if "width" not in facts:
        facts["width"] = c.integer("moe_intermediate_size")
    return Moe(
        experts=experts,
        top_k=c.integer(top_k, maximum=experts),
        act=c.choice("hidden_act", ACTIVATIONS, "silu"),
        **facts,
    )


def deepseek_experts_of(
    c: ConfigReader, key: str = "n_routed_experts", shared: str = "n_shared_experts", **facts: Any
) -> Moe:
    """DeepSeek-V3's mixture: sigmoids, a bias for the choice, groups, a scale, shared ones."""
    c.only("scoring_func", "sigmoid", "noaux_tc")
    c.only("topk_method", "noaux_tc")
    width, experts = c.integer("moe_intermediate_size"), num_experts_of(c, key)
    groups, top_groups = groups_of(c, experts)
    num_shared = c.integer(shared, 0, minimum=0)
    moe = experts_of(
        c,
        key,
        **{
            "score": "sigmoid",
            "renorm": c.flag("norm_topk_prob", True),
            "scale": c.number("routed_scaling_factor", 1.0),
            "groups": groups,
            "top_groups": top_groups,
            "select_bias": True,
            "wide_router": True,
            "shared": shared_expert(c, width * num_shared) if num_shared else None,
            **facts,
        },
    )
    eligible = experts // groups * top_groups
    if moe.top_k > eligible:
        allowed = f"at most the {eligible} experts of topk_group={top_groups} groups"
        raise unsupported("num_experts_per_tok", moe.top_k, allowed)
    return moe


def groups_of(c: ConfigReader, experts: int) -> tuple[int, int]:
    """`n_group` and `topk_group`."""
    groups = c.integer("n_group", 1)
    # a group's score is the sum of its two best experts
    if experts % groups or (groups > 1 and experts // groups < 2):
        allowed = f"a divisor of {experts} experts that leaves two or more in each group"
        raise unsupported("n_group", groups, allowed)
    return groups, c.integer("topk_group", 1, maximum=groups)


def shared_expert(c: ConfigReader, width: int, **facts: Any) -> Mlp:
    """A shared expert, with the activation of the others."""
    return Mlp(width, c.choice("hidden_act", ACTIVATIONS, "silu"), **facts)


def with_experts(block: Block | list[Block], moe: Moe, sparse: list[bool]) -> list[Block]:
    """The block, or that of each layer, with a mixture where `sparse` is true."""
    blocks = [block] * len(sparse) if isinstance(block, Block) else block
    return [replace(b, mlp=moe) if s else b for b, s in zip(blocks, sparse, strict=True)]


def sparse_after(c: ConfigReader, dense: int = 0) -> list[bool]:
    """Whether each layer has experts: all but the first `first_k_dense_replace`, where the config
    has that key, or else the first `dense`.
    """
    depth = num_layers_of(c)
    c.only("moe_layer_freq", 1)
    first = c.integer("first_k_dense_replace", dense, minimum=0, maximum=depth)
    return [layer >= first for layer in range(depth)]


def sparse_by_type(c: ConfigReader, default: list[bool]) -> list[bool]:
    """`mlp_layer_types`, one of dense and sparse per layer."""
    usual = ["sparse" if s else "dense" for s in default]
    kinds = read_kinds(c, "mlp_layer_types", ("dense", "sparse"), usual)
    return [kind == "sparse" for kind in kinds]


def sparse_by_step(c: ConfigReader) -> list[bool]:
    """Qwen's keys: every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    depth, every = num_layers_of(c), c.integer("decoder_sparse_step", 1)
    dense = c.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise unsupported("mlp_only_layers", dense, "a list of layer numbers")
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(depth)]
