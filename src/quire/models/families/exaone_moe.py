"""K-EXAONE: EXAONE 4's attention, which does not rotate in full layers, with norms before the
sub-layers and DeepSeek-V3's experts.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.exaone4 import exaone_blocks
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.families.mixtures import (
    QWEN_RULES,
    deepseek_experts_of,
    select_bias_rule,
    shared_rules,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norm = rms(c, 1e-5)
    dense = Block(attention(c, qk_norm=norm), mlp(c), norm)
    moe = deepseek_experts_of(
        c, "num_experts", "num_shared_experts", scale=c.number("routed_scaling_factor", 2.5)
    )
    blocks = exaone_blocks(c, dense)
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(blocks, moe, sparse))


FAMILY = Family(
    ("ExaoneMoeForCausalLM",),
    _describe,
    (
        *RULES,
        *QWEN_RULES,
        select_bias_rule("mlp.e_score_correction_bias"),
        *shared_rules("mlp.shared_experts"),
    ),
    ignored=(r"mtp\..*",),
)
