"""Gemma 2: norms before and after each sub-layer, windows in every other layer, soft caps on scores
and logits; VaultGemma without the norms after.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.gemma import gemma_attention, gemma_norm, gemma_top
from quire.models.families.llama import RULES, mlp, norm_rules, sliding_blocks, stack, window_of
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Mlp

SANDWICH_RULES = (
    *norm_rules(
        attn_post="post_attention_layernorm",
        mlp_pre="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
    *RULES,
)


def sandwich(c: ConfigReader, attn: Attention, **facts: Any) -> Block:
    """The block of Gemma 2 and 3, with what differs as keywords."""
    c.only(
        "hidden_act", "gelu_pytorch_tanh"
    )  # some files repeat it; hidden_activation is what counts
    feed: Mlp = mlp(c, act_key="hidden_activation", act="gelu_pytorch_tanh")
    return Block(attn, feed, gemma_norm(c), **{"post": True, **facts})


def capped(c: ConfigReader, default: float | None) -> dict[str, Any]:
    """Gemma's top with the cap on logits."""
    cap = c.bound("final_logit_softcapping", default)
    return {**gemma_top(c), "logit_softcap": cap}


def _describe(c: ConfigReader, **block: Any) -> Decoder:
    attn = gemma_attention(
        c,
        scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=c.bound("attn_logit_softcapping", 50.0),
    )
    block_of_all, window = sandwich(c, attn, **block), window_of(c, 4096)
    blocks = sliding_blocks(c, block_of_all, lambda layer: layer % 2 == 0, window)
    return stack(c, blocks, **capped(c, 30.0))


GEMMA2 = Family(("Gemma2ForCausalLM",), _describe, SANDWICH_RULES)
VAULT = Family(("VaultGemmaForCausalLM",), partial(_describe, post=False), SANDWICH_RULES)
