"""CodeGen: GPT-J with queries, values and keys in one tensor of four parts."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.gptj import FAMILY as GPTJ
from quire.models.families.gptj import describe_gptj
from quire.models.families.llama import layer_rules
from quire.models.rules import Family
from quire.models.spec import Decoder

_PARTS = 4
"""In which the projections of the published models were trained."""


def _describe(c: ConfigReader) -> Decoder:
    decoder = describe_gptj(c)
    c.integer("n_ctx", None)  # the context again
    heads = c.integer("num_attention_heads")
    if heads % _PARTS:
        raise unsupported("n_head", heads, f"a multiple of {_PARTS}")
    return decoder


assert isinstance(GPTJ.rules, tuple)
FAMILY = Family(
    ("CodeGenForCausalLM",),
    _describe,
    (
        *layer_rules(
            {"attn.qkv_proj": "attn.q attn.v attn.k"}, at="{prefix}h.{layer}.", step="by_quarter"
        ),
        *GPTJ.rules,
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.causal_mask",),
)
