"""FlexOlmo: OLMo 2's attention and norms with OLMoE's experts."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import attention, biases, rms, stack
from quire.models.families.mixtures import QWEN_RULES, experts_of
from quire.models.families.olmo2 import OLMO2_RULES
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-6, "rms_late_cast")
    attn = attention(c, theta=5e5, qk_norm=norm, qk_norm_over="full", **biases(c))
    moe = experts_of(
        c,
        "num_experts",
        width=c.integer("intermediate_size"),
        renorm=c.flag("norm_topk_prob", False),
    )
    return stack(c, Block(attn, moe, norm, pre=False, post=True))


FAMILY = Family(("FlexOlmoForCausalLM",), _describe, OLMO2_RULES + QWEN_RULES)
