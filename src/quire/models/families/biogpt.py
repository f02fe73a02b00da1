"""BioGPT: learned positions that begin at the third row of their table, layer norms, a scaled
embedding.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import attention, context_of, layer_rules, mlp, stack
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Norm

_RULES = (
    rule("{prefix}embed_tokens.weight", "embed.weight"),
    rule("{prefix}embed_positions.weight", "positions.weight"),
    rule("{prefix}layer_norm.{leaf}", "norm.{leaf}"),
    rule("output_projection.{leaf}", "head.{leaf}"),
    *layer_rules(
        {
            **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "self_attn.out_proj": "attn.o",
            "self_attn_layer_norm": "attn_pre",
            "final_layer_norm": "mlp_pre",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        }
    ),
)
# fairseq, where it was trained, counts positions from the padding token's id + 1
_FIRST_POSITION = 2


def _describe(c: ConfigReader) -> Decoder:
    c.ignore("layer_norm_eps")  # which no implementation reads
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop")
    norm = Norm("layer", 1e-5, bias=True)
    attn = attention(c, rope=None, qkv_bias=True, o_bias=True)
    is_scaled = c.flag("scale_embedding", True)
    return stack(
        c,
        Block(attn, mlp(c, act="gelu", gated=False, bias=True), norm),
        embed_scale=c.integer("hidden_size") ** 0.5 if is_scaled else 1.0,
        learned_positions=context_of(c),
        position_offset=_FIRST_POSITION,
        tie=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    ("BioGptForCausalLM",), _describe, _RULES, prefix="biogpt.", ignored=(r"output_projection\..*",)
)
