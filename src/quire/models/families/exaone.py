"""EXAONE 3 and 3.5: Llama under other names."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import attention, layer_rules, mlp, stack, top_rules
from quire.models.rules import Family
from quire.models.spec import Block, Decoder, Norm

RULES = (
    *top_rules("wte", "ln_f"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            **{f"attn.attention.{part}_proj": f"attn.{part}" for part in "qkv"},
            "attn.attention.out_proj": "attn.o",
            "ln_2": "mlp_pre",
            "mlp.c_fc_0": "mlp.gate",
            "mlp.c_fc_1": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        at="{prefix}h.{layer}.",
    ),
)


def _describe(c: ConfigReader) -> Decoder:
    c.rename(num_hidden_layers="num_layers", hidden_act="activation_function")
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-5))
    return stack(c, Block(attention(c), mlp(c), norm))


FAMILY = Family(
    ("ExaoneForCausalLM",),
    _describe,
    RULES,
    prefix="transformer.",
    oracle="reference",
    ignored=(r"h\.\d+\.attn\.attention\.rotary\.inv_freq", r"rotary\.inv_freq"),
)
