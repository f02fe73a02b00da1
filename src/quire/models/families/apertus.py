"""Apertus: a norm over each query and key head, and an ungated feed-forward part with xIELU."""

from __future__ import annotations

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader
from quire.models.families.llama import LAYER, RULES, attention, biases, norm_rules, rms, stack
from quire.models.parameters import XIELU_PARTS
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, Mlp


def _number_rule(part: str) -> Rule:
    """The learned numbers are stored as lists of one, the others without an axis."""
    stored, ours = f"mlp.act_fn.{part}", f"layers.{{layer}}.mlp.xielu.{part}"
    return rule(LAYER + stored, ours, steps=() if part.startswith("alpha") else ("scalar",))


_RULES = (
    *(_number_rule(part) for part in XIELU_PARTS),
    *norm_rules(attn_pre="attention_layernorm", mlp_pre="feedforward_layernorm"),
    *RULES,
)


def _describe(c: ConfigReader) -> Decoder:
    c.only("hidden_act", "xielu")
    c.only("mlp_bias", False)
    c.only("post_norm", False)
    c.only("qk_norm", True)
    # absent, transformers takes a llama3 scaling of its own; a rotation is too much to assume
    # silently
    if "rope_scaling" not in c and "rope_parameters" not in c:
        raise LoadError("config.json lacks rope_scaling, which Apertus needs.")
    norm = rms(c, 1e-5)
    attn = attention(c, theta=12e6, qk_norm=norm, **biases(c))
    return stack(c, Block(attn, Mlp(c.integer("intermediate_size"), "xielu", gated=False), norm))


def _describe_1p5(c: ConfigReader) -> Decoder:
    """The text of Apertus 1.5, whose head has all tokens."""
    c.only("output_vocab_size", c.integer("vocab_size"))
    return _describe(c)


APERTUS = Family(("ApertusForCausalLM",), _describe, _RULES)
APERTUS_1P5 = Family(("Apertus1p5TextForCausalLM",), _describe_1p5, _RULES)
