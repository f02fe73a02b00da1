"""GLM-4.5, 4.6 and 4.7: half of each head rotated, DeepSeek-V3's experts after dense layers; also
in GLM-4.5V and 4.6V.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.glm import with_axes
from quire.models.families.llama import RULES, attention, mlp, rms, stack
from quire.models.families.mixtures import (
    DEEPSEEK_RULES,
    deepseek_experts_of,
    sparse_after,
    with_experts,
)
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    c.raw("num_nextn_predict_layers", None)  # their layers follow the decoder's and are left out
    norm = rms(c, 1e-5)
    attn = attention(
        c,
        partial=0.5,
        qk_norm=norm if c.flag("use_qk_norm", False) else None,
        qkv_bias=c.flag("attention_bias", False),
    )
    return _with_experts(c, attn)


def _describe_in_vl(c: ConfigReader) -> Decoder:
    bias = c.flag("attention_bias", True)
    return _with_experts(c, with_axes(attention(c, partial=0.5, qkv_bias=bias)))


def _with_experts(c: ConfigReader, attn: Attention) -> Decoder:
    dense = Block(attn, mlp(c), rms(c, 1e-5))
    return stack(c, with_experts(dense, deepseek_experts_of(c), sparse_after(c, dense=1)))


FAMILY = Family(
    ("Glm4MoeForCausalLM",), _describe, RULES + DEEPSEEK_RULES, drafts_after_layers=True
)
IN_VL = Family(("Glm4vMoeTextModel",), _describe_in_vl, RULES + DEEPSEEK_RULES)
