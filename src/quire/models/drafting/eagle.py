"""EAGLE (Li et al. 2024) and EAGLE-3 (2025) draft networks, as their authors store them and in the
layout of the "speculators" library.

Their layers are Llama's; biases and norms of queries and keys are there where the files have them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.drafting.network import DraftNetwork
from quire.models.drafting.spec import DraftDecoder, DraftInputs
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    context_of,
    mlp,
    num_layers_of,
    rms,
)
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, AttentionOverEmbedding, Block, Decoder

_ARCHITECTURES = ("EagleLlamaForCausalLM",)
_BUFFERS = (r"(d2t|t2d)", r".*rotary_emb\.inv_freq")
_OF_TRAINING = (
    *("target_model_type", "num_lookahead_tokens", "modal_type", "embed_requires_grad"),
    *("rope_parameters_base", "verifier", "ttt_steps", "max_window_layers", "sliding_window"),
)
_MIDLAYER = "midlayer."


def read_eagle(config: Mapping[str, Any], target: Decoder, names: Collection[str]) -> DraftNetwork:
    """The EAGLE network that a config.json describes, whose files have tensors of these `names`.

    Raises LoadError subclasses for what it does not know or does not have.
    """
    c = ConfigReader(config)
    block, depth = _block(c, "layers.0.", names), num_layers_of(c)
    # the first layer has no norm of its input, which comes out of fc as it is
    blocks = [replace(block, mixer_pre=False), *[block] * (depth - 1)]
    _check_width(c, target)
    inputs = DraftInputs(
        target.dim,
        target.vocab,
        fc_bias="fc.bias" in names,
        has_embedding=_has_embedding(target.dim, target, names),
        has_head="lm_head.weight" in names,
    )
    context = context_of(c)
    _check_vocab(c, target)
    c.ignore("tie_word_embeddings", "attention_bias", "bias", *_OF_TRAINING)
    c.finish()
    # no final norm: the network guesses states as the target's head reads them, after the target's
    # norm
    spec = DraftDecoder(target.vocab, target.dim, tuple(blocks), None, context, inputs=inputs)
    rules = (rule("fc.{leaf}", "draft.fc.{leaf}"), *RULES)
    return DraftNetwork(spec, _family(rules))


def read_eagle3(config: Mapping[str, Any], target: Decoder, names: Collection[str]) -> DraftNetwork:
    """The EAGLE-3 network that a config.json describes, see `read_eagle`."""
    c, inner = _readers(config)
    first = _MIDLAYER if any(name.startswith(_MIDLAYER) for name in names) else "layers.0."
    block, depth = _block(inner, first, names), num_layers_of(inner)
    if first == _MIDLAYER and depth > 1:
        raise unsupported("num_hidden_layers", depth, "one layer, which is named midlayer")
    c.only("fc_norm", False)
    # an absent key means true in the layout of speculators, and false in that of the authors
    joins_normed = c.flag("norm_before_residual", inner is not c)
    aux = _aux_layers(c, target)
    vocab = c.integer("draft_vocab_size", target.vocab, maximum=target.vocab)
    dim = inner.integer("hidden_size")
    inputs = DraftInputs(
        c.integer("target_hidden_size", target.dim),
        target.vocab,
        join="attention",
        num_states=len(aux),
        aux_layers=aux,
        state_norm=block.norm if joins_normed else None,
        fc_norm=block.norm if c.flag("norm_before_fc", False) else None,
        feeds_normed=c.flag("norm_output", False),
        has_embedding=_has_embedding(dim, target, names),
        has_head="lm_head.weight" in names or vocab < target.vocab,
    )
    if inputs.width != target.dim:
        raise unsupported("target_hidden_size", inputs.width, f"{target.dim}, the target's")
    assert isinstance(block.mixer, Attention)
    over = AttentionOverEmbedding(block.mixer, block.norm)
    blocks = (replace(block, mixer=over, mixer_pre=not joins_normed), *[block] * (depth - 1))
    context = context_of(inner)
    _check_vocab(inner, target)
    for reader in (c, inner):
        reader.ignore("tie_word_embeddings", "attention_bias", *_OF_TRAINING)
    c.finish()  # and what is within
    spec = DraftDecoder(vocab, dim, blocks, block.norm, context, inputs=inputs)
    norm = "draft.state_norm" if joins_normed else "layers.0.attn_pre"
    layer: tuple[Rule, ...] = RULES
    if first == _MIDLAYER:
        layer = tuple(replace(r, source=r.source.replace(LAYER, _MIDLAYER)) for r in RULES)
    rules = (
        rule("fc.{leaf}", "draft.fc.{leaf}"),
        rule("input_norm.{leaf}", "draft.fc_norm.{leaf}"),
        rule(first + "hidden_norm.{leaf}", norm + ".{leaf}"),
        rule(first + "input_layernorm.{leaf}", "layers.0.embed_norm.{leaf}"),
        *layer,
    )
    return DraftNetwork(spec, _family(rules), "d2t" if spec.is_partial else None)


def _readers(config: Mapping[str, Any]) -> tuple[ConfigReader, ConfigReader]:
    """Readers of the network's keys and of its layers' keys: two in the layout of speculators."""
    c = ConfigReader(config)
    if "speculators_model_type" not in c:
        return c, c
    c.choice_of("speculators_model_type", "eagle3")
    c.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init")
    return c, c.subconfig("transformer_layer_config")


def _block(c: ConfigReader, first: str, names: Collection[str]) -> Block:
    """Llama's block, with the biases and norms that the first layer's tensors have."""
    c.ignore("model_type")
    norm = rms(c, 1e-6)
    has = {
        part: f"{first}self_attn.{part}" in names
        for part in ("q_proj.bias", "o_proj.bias", "q_norm.weight")
    }
    attn = attention(
        c,
        qkv_bias=has["q_proj.bias"],
        o_bias=has["o_proj.bias"],
        qk_norm=norm if has["q_norm.weight"] else None,
    )
    return Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), norm)


def _aux_layers(c: ConfigReader, target: Decoder) -> tuple[int, ...]:
    """The layers of the target whose inputs are read."""
    depth = len(target.blocks)
    # a low, a middle and a high layer, as EAGLE-3 was published
    usual: Any = [2, depth // 2, depth - 3]
    inner = c.section("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    layers = c.raw(key, None)
    if inner is not None:
        inner.only("use_aux_hidden_state", True)
        layers = inner.raw(key, layers)
    layers = usual if layers is None else layers
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or len({*layers} & {*range(depth + 1)}) < len(layers) or not layers:
        raise unsupported(key, layers, f"different layers of the target's {depth}")
    return tuple(sorted(layers))


def _check_width(c: ConfigReader, target: Decoder) -> None:
    width = c.integer("hidden_size")
    if width != target.dim:
        raise unsupported("hidden_size", width, f"{target.dim}, the target's")


def _check_vocab(c: ConfigReader, target: Decoder) -> None:
    vocab = c.integer("vocab_size", target.vocab)
    if vocab != target.vocab:
        raise unsupported("vocab_size", vocab, f"{target.vocab}, the target's")


def _has_embedding(dim: int, target: Decoder, names: Collection[str]) -> bool:
    """Whether a network of `dim` numbers has an embedding of its own. Raises LoadError for one that
    has none, where the target's does not fit.
    """
    fits = dim == target.dim and target.embed_scale == 1.0
    # weights are drawn: without files the target's embedding serves where it fits
    if not names:
        return not fits
    if "embed_tokens.weight" not in names and not fits:
        raise LoadError(
            "The draft network has no embed_tokens.weight, and the target's embedding does not fit "
            f"it: {target.dim} numbers, scaled by {target.embed_scale:g}, for {dim}."
        )
    return "embed_tokens.weight" in names


def _family(rules: tuple[Rule, ...]) -> Family:
    def describe(c: ConfigReader) -> Decoder:
        raise AssertionError("a draft network is described together with its target")

    return Family(_ARCHITECTURES, describe, rules, prefix="", ignored=_BUFFERS)
