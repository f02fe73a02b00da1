"""EXAONE 3 to 4, and K-EXAONE."""

from __future__ import annotations

from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    RULES,
    attention,
    layer_rules,
    mlp,
    rms,
    sliding_blocks,
    stack,
    top_rules,
    window_of,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    deepseek_experts_of,
    select_bias_rule,
    shared_rules,
    sparse_after,
    sparse_by_type,
    with_experts,
)
from quire.models.families.olmo import OLMO2_RULES
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Norm

EXAONE_RULES = (
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


def _describe_exaone(c: ConfigReader) -> Decoder:
    """EXAONE 3 and 3.5: Llama under other names."""
    c.rename(num_hidden_layers="num_layers", hidden_act="activation_function")
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-5))
    return stack(c, Block(attention(c), mlp(c), norm))


EXAONE = Family(
    ("ExaoneForCausalLM",),
    _describe_exaone,
    EXAONE_RULES,
    prefix="transformer.",
    oracle="reference",
    ignored=(r"h\.\d+\.attn\.attention\.rotary\.inv_freq", r"rotary\.inv_freq"),
)


def _describe_exaone4(c: ConfigReader) -> Decoder:
    """EXAONE 4: norms after the sub-layers only, one over each query and key head, and in models
    with windows no rotation in the layers that see everything.
    """
    norm = rms(c, 1e-5)
    block = Block(attention(c, qk_norm=norm), mlp(c), norm, pre=False, post=True)
    return stack(c, exaone_blocks(c, block))


def exaone_blocks(c: ConfigReader, block: Block) -> list[Block]:
    """The block of each layer: with a window, or in a model with windows without rotation."""
    window = window_of(c, 4096)
    letters = _pattern(c, window)
    assert isinstance(block.mixer, Attention), "EXAONE attends"
    rope = block.mixer.rope
    ropes = {"sliding_attention": rope, "full_attention": rope if window is None else None}
    return sliding_blocks(c, block, lambda i: letters[i % len(letters)] == "L", window, ropes)


def _pattern(c: ConfigReader, window: int | None) -> str:
    """Every n-th layer sees everything; files write n, or letters such as LLLG, which repeat."""
    written: Any = c.raw("sliding_window_pattern", 4)
    if isinstance(written, str) and written and set(written) <= {"L", "G"}:
        letters = written
    elif window is None:
        letters = "G"
    else:
        letters = "L" * (c.integer("sliding_window_pattern", 4) - 1) + "G"
    if not letters.strip("G") and window is not None:
        raise unsupported("sliding_window_pattern", written, "a pattern with sliding layers")
    return letters


EXAONE4 = Family(("Exaone4ForCausalLM",), _describe_exaone4, OLMO2_RULES)


def _describe_exaone_moe(c: ConfigReader) -> Decoder:
    """K-EXAONE: EXAONE 4's attention, which does not rotate in full layers, with norms before the
    sub-layers and DeepSeek-V3's experts.
    """
    norm = rms(c, 1e-5)
    dense = Block(attention(c, qk_norm=norm), mlp(c), norm)
    moe = deepseek_experts_of(
        c, "num_experts", "num_shared_experts", scale=c.number("routed_scaling_factor", 2.5)
    )
    blocks = exaone_blocks(c, dense)
    sparse = sparse_by_type(c, sparse_after(c, dense=1))
    return stack(c, with_experts(blocks, moe, sparse))


EXAONE_MOE = Family(
    ("ExaoneMoeForCausalLM",),
    _describe_exaone_moe,
    (
        *RULES,
        *QWEN_RULES,
        select_bias_rule("mlp.e_score_correction_bias"),
        *shared_rules("mlp.shared_experts"),
    ),
    ignored=(r"mtp\..*",),
)
