"""NomicBERT: BERT with rotated positions, gated units and no biases but those of norms."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.encoders import (
    POOLER_RULES,
    UNUSED_HEADS,
    check_encoder,
    forms,
    hidden_layer,
    whole_attention,
)
from quire.models.families.llama import ACTIVATIONS, context_of, layer_norm, layer_rules, stack
from quire.models.rope_config import read_rope
from quire.models.rules import Family, rule
from quire.models.spec import Block, Decoder, Mlp

_RULES = (
    rule("{prefix}embeddings.word_embeddings.weight", "embed.weight"),
    rule("{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
    rule("{prefix}emb_ln.{leaf}", "embed_norm.{leaf}"),
    *layer_rules(
        {
            "attn.Wqkv": "attn.q attn.k attn.v",
            "attn.out_proj": "attn.o",
            "norm1": "attn_post",
            "mlp.fc11": "mlp.up",
            "mlp.fc12": "mlp.gate",
            "mlp.fc2": "mlp.down",
            "norm2": "mlp_post",
        },
        at="{prefix}encoder.layers.{layer}.",
    ),
)
_IMPLEMENTATION = (
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple"),
    *("use_flash_attn", "use_xentropy", "last_layer_subset", "max_trained_positions"),
)
"""Keys of how the published code computes the same."""
_OFF = (
    *("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "parallel_block_tied_norm"),
    *("prenorm", "qkv_proj_bias", "rotary_emb_interleaved", "use_rms_norm"),
    "scale_attn_by_inverse_layer_idx",
)
_MIXTURES = ("moe_every_n_layers", "num_experts", "num_shared_experts")
_OF_MIXTURES = (
    *("moe_top_k", "moe_impl", "moe_normalize_expert_weights", "moe_resid_pdrop"),
    *("expert_choice_router", "ffn_div", "router_aux_loss_coef"),
)


def _describe(c: ConfigReader) -> Decoder:
    c.rename(
        hidden_size="n_embd",
        intermediate_size="n_inner",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
        layer_norm_eps="layer_norm_epsilon",
        hidden_act="activation_function",
        rope_theta="rotary_emb_base",
    )
    check_encoder(c)
    c.ignore(*_IMPLEMENTATION, *_OF_MIXTURES)
    for key in _OFF:
        c.only(key, False)
    for key in _MIXTURES:
        c.only(key, 0)  # layers of experts
    c.only("scale_attn_weights", True)
    c.only("rotary_emb_fraction", 1.0)
    for key in ("rotary_emb_scale_base", "rotary_scaling_factor"):
        c.only(key, None)
    trained = c.integer("max_trained_positions", context_of(c))
    # beyond the trained length the published code stretches the rotation by rotary_scaling_factor,
    # which is refused above
    context = min(context_of(c), trained)
    attn = whole_attention(c, c.integer("head_dim", None))
    rope = read_rope(c, attn.head_dim, theta=1000.0, context=context, kinds=("default",))
    norm = layer_norm(c, eps=c.number("layer_norm_eps", 1e-12))
    act = c.choice("hidden_act", {**ACTIVATIONS, "swiglu": "silu"}, "silu")
    return stack(
        c,
        Block(
            replace(attn, rope=rope), Mlp(c.integer("intermediate_size"), act), norm, norms_sum=True
        ),
        embed_norm=norm,
        final_norm=None,
        context=context,
        token_types=c.integer("type_vocab_size", 2),
        tie=False,
    )


FAMILY = forms(
    Family(
        (), _describe, _RULES, prefix="nomic_bert.", ignored=(r"pooler\.dense\..*", UNUSED_HEADS)
    ),
    "NomicBert",
    layers=hidden_layer("tanh"),
    rules=POOLER_RULES,
)
