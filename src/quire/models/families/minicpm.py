"""MiniCPM 1 and 2: Llama with scaled embeddings, sub-layers and logits."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import RULES, attention, biases, mlp, num_layers_of, rms, stack
from quire.models.rules import Family
from quire.models.spec import Block, Decoder


def _describe(c: ConfigReader) -> Decoder:
    depth_scale = c.number("scale_depth", 1.0) / num_layers_of(c) ** 0.5
    block = Block(attention(c, **biases(c)), mlp(c), rms(c, 1e-6), residual_scale=depth_scale)
    return stack(
        c,
        block,
        embed_scale=c.number("scale_emb", 1.0),
        logit_scale=c.number("dim_model_base", 1.0) / c.integer("hidden_size"),
        tie=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family(("MiniCPMForCausalLM",), _describe, RULES, oracle="reference")
