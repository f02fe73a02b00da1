"""MiniCPM of all versions: scaled embeddings, sub-layers and logits."""

from __future__ import annotations

import math

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.latent_attention import LATENT_RULES, latent_attention
from quire.models.families.llama import RULES, attention, biases, mlp, num_layers_of, rms, stack
from quire.models.rope_config import SCALINGS
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe_minicpm(c: ConfigReader) -> Decoder:
    """MiniCPM 1 and 2: Llama with scaled embeddings, sub-layers and logits."""
    depth_scale = c.number("scale_depth", 1.0) / num_layers_of(c) ** 0.5
    block = Block(attention(c, **biases(c)), mlp(c), rms(c, 1e-6), residual_scale=depth_scale)
    return stack(
        c,
        block,
        embed_scale=c.number("scale_emb", 1.0),
        logit_scale=c.number("dim_model_base", 1.0) / c.integer("hidden_size"),
        tie=c.flag("tie_word_embeddings", True),
    )


MINICPM = Family(("MiniCPMForCausalLM",), _describe_minicpm, RULES, oracle="reference")


def _describe_minicpm3(c: ConfigReader) -> Decoder:
    """MiniCPM3: latent attention, and multipliers on embedding, residuals and logits."""
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if width % heads and "v_head_dim" not in c:
        allowed = f"a divisor of hidden_size={width}, unless v_head_dim is given"
        raise unsupported("num_attention_heads", heads, allowed)
    attn = latent_attention(
        c,
        interleaved=False,
        ropes=SCALINGS,
        q_rank=768,
        rank=256,
        unrotated=64,
        rotated=32,
        value_dim=width // heads,
    )
    depth, base = c.bound("scale_depth", 1.4), c.bound("dim_model_base", 256)
    block = Block(
        attn,
        mlp(c, bias=c.flag("mlp_bias", False)),
        rms(c, 1e-5),
        residual_scale=1.0 if depth is None else depth / math.sqrt(num_layers_of(c)),
    )
    return stack(
        c,
        block,
        embed_scale=c.number("scale_emb", 12.0),
        logit_scale=1.0 if base is None else base / width,
        tie=c.flag("tie_word_embeddings", True),
    )


MINICPM3 = Family(("MiniCPM3ForCausalLM",), _describe_minicpm3, LATENT_RULES)
