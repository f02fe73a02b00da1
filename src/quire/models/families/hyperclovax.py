"""HyperCLOVA X: Granite with norms after the sub-layers, too."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    head_dim_of,
    mlp,
    norm_rules,
    rms,
    stack,
)
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    dim = head_dim_of(c)
    scale = c.number("attention_multiplier", dim**-0.5)
    block = Block(
        attention(c, head_dim=dim, scale=scale, **biases(c)),
        mlp(c, bias=c.flag("mlp_bias", False)),
        rms(c, 1e-6),
        post=c.flag("use_post_norm", True),
        residual_scale=c.number("residual_multiplier", 1.0),
    )
    return stack(
        c,
        block,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=c.number("logits_scaling", 1.0),
    )


_POST_NORM_RULES = norm_rules(attn_post="post_norm1", mlp_post="post_norm2")
FAMILY = Family(("HyperCLOVAXForCausalLM",), _describe, RULES + _POST_NORM_RULES, scales_given=True)
