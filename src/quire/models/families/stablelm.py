"""StableLM: layer norms, partial rotation, sequential blocks or parallel ones with one norm; in
the largest a norm of each query and key head.
"""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import LAYER, RULES, attention, layer_norm, mlp, stack
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    norms: dict[str, Any] = {}
    if c.flag("qk_layernorm", False):
        norms = {"qk_norm": layer_norm(c, bias=False), "qk_norm_over": "heads_apart"}
    attn = attention(c, partial=0.25, qkv_bias=c.flag("use_qkv_bias", False), **norms)
    is_parallel = c.flag("use_parallel_residual", False)
    block = Block(attn, mlp(c), layer_norm(c), parallel="one_norm" if is_parallel else "no")
    return stack(c, block)


FAMILY = Family(
    ("StableLmForCausalLM",),
    _describe,
    (
        *(
            rule(
                f"{LAYER}self_attn.{part}_layernorm.norms.{{expert}}.{{leaf}}",
                f"layers.{{layer}}.attn.{part}_norm.{{expert}}.{{leaf}}",
            )
            for part in "qk"
        ),
        *RULES,
    ),
)
