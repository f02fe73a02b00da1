"""OPT and BioGPT, whose positions begin at the third row of their table."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import attention, context_of, layer_rules, mlp, stack, top_rules
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Norm

_RULES = (
    rule("{prefix}embed_positions.weight", "positions.weight"),
    *layer_rules(
        {
            "self_attn_layer_norm": "attn_pre",
            **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "self_attn.out_proj": "attn.o",
            "final_layer_norm": "mlp_pre",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        }
    ),
)
# fairseq, where both were trained, counts positions from the padding token's id + 1
_FIRST_POSITION = 2


def _describe_opt(c: ConfigReader) -> Decoder:
    """OPT: learned positions that begin at the third row of their table, layer norms, relu."""
    c.only("do_layer_norm_before", True)  # the 350m model normalises after its sub-layers
    c.only("word_embed_proj_dim", c.integer("hidden_size"))
    c.only("_remove_final_layer_norm", False)
    c.only("layer_norm_elementwise_affine", True)
    bias = c.flag("enable_bias", True)
    attn = attention(c, rope=None, qkv_bias=bias, o_bias=bias)
    width = c.integer("ffn_dim")
    feed = mlp(c, width=width, act_key="activation_function", act="relu", gated=False, bias=bias)
    return stack(
        c,
        Block(attn, feed, Norm("layer", 1e-5, bias=True)),
        learned_positions=context_of(c),
        position_offset=_FIRST_POSITION,
        tie=c.flag("tie_word_embeddings", True),
    )


OPT = Family(
    ("OPTForCausalLM",),
    _describe_opt,
    (*top_rules("embed_tokens", "final_layer_norm"), *_RULES),
    prefix="model.decoder.",
)


def _describe_biogpt(c: ConfigReader) -> Decoder:
    """BioGPT: positions that begin at the table's third row, layer norms, a scaled embedding."""
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


BIOGPT = Family(
    ("BioGptForCausalLM",),
    _describe_biogpt,
    (*top_rules("embed_tokens", "layer_norm", "output_projection"), *_RULES),
    prefix="biogpt.",
    ignored=(r"output_projection\..*",),
)
