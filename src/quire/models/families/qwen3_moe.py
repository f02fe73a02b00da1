"""Qwen3 mixture of experts: Qwen3's attention, experts in the layers that the config says."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, rms, stack, window_of
from quire.models.families.mixtures import QWEN_RULES, experts_of, sparse_by_step, with_experts
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-6)
    attn = attention(c, qk_norm=norm, window=_window(c), **biases(c))
    dense = Block(attn, mlp(c), norm)
    moe = experts_of(c, _num_experts_key(c), renorm=c.flag("norm_topk_prob", False))
    return stack(c, with_experts(dense, moe, sparse_by_step(c)))


def _window(c: ConfigReader) -> int | None:
    """All layers or none: this family reads no `layer_types`."""
    c.raw("max_window_layers", None)
    window = window_of(c, 4096)
    return window if c.flag("use_sliding_window", False) else None


def _num_experts_key(c: ConfigReader) -> str:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    key = "num_experts" if "num_experts" in c else "num_local_experts"
    c.only("num_local_experts", c.raw(key, None))
    return key


FAMILY = Family(("Qwen3MoeForCausalLM",), _describe, RULES + QWEN_RULES)
