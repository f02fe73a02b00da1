"""OLMoE: experts in every layer, and norms over the full width of queries and keys."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, rms, stack
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.only("clip_qkv", None)  # OLMoE would clip after the norm; no released model does
    norm = rms(c, 1e-5)
    attn = attention(c, qk_norm=norm, qk_norm_over="full", **biases(c))
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm))


FAMILY = Family(("OlmoeForCausalLM",), _describe, RULES + QWEN_RULES)
