"""Gemma 3n, text, and its parts that Gemma 4 has, too."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, is_number, unsupported
from quire.models.families.gemma import SANDWICH_RULES, capped, gemma_attention
from quire.models.families.llama import (
    ACTIVATIONS,
    LAYER,
    context_of,
    head_dim_of,
    layer_rules,
    num_layers_of,
    read_layer_types,
    rms,
    stack,
    window_of,
    with_ropes,
    with_windows,
)
from quire.models.rope_config import read_ropes
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Activation, Attention, Block, Decoder, LayerInputs, Mlp, Norm, Streams

SHARING_RULES = (
    *SANDWICH_RULES,
    *layer_rules(
        {
            "per_layer_input_gate": "inputs.gate",
            "per_layer_projection": "inputs.proj",
            "post_per_layer_input_norm": "inputs.post",
        }
    ),
    rule("{prefix}embed_tokens_per_layer.weight", "inputs.embed.weight"),
    rule("{prefix}per_layer_model_projection.weight", "inputs.proj.weight"),
    rule("{prefix}per_layer_projection_norm.weight", "inputs.norm.weight"),
)
UNUSED_TENSORS = (r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",)
"""Files carry keys and values of layers that have none."""


def activation_of(c: ConfigReader) -> Activation:
    """The activation of all feed-forward parts and gates."""
    act: Activation = c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    return act


def layer_inputs_of(c: ConfigReader, norm: Norm) -> LayerInputs | None:
    """The inputs of layers; a width of 0 means none."""
    width = c.integer("hidden_size_per_layer_input", 256, minimum=0)
    vocab = c.integer("vocab_size_per_layer_input", 262144)
    return LayerInputs(width, vocab, norm) if width else None


def num_sharing_of(c: ConfigReader, default: int) -> int:
    """Number of the last layers that have no keys and values of their own."""
    shared: int = c.integer("num_kv_shared_layers", default, minimum=0)
    if shared >= num_layers_of(c):
        raise unsupported("num_kv_shared_layers", shared, "less than num_hidden_layers")
    return shared


def with_sharing(blocks: list[Block], kinds: list[str], shared: int) -> list[Block]:
    """The last `shared` blocks read the keys and values of the last layer of their type before."""
    own = len(blocks) - shared
    sources = {kind: i for i, kind in enumerate(kinds[:own])}
    if missing := set(kinds) - sources.keys():
        allowed = f"one that leaves a layer of {missing.pop()} with keys and values"
        raise unsupported("num_kv_shared_layers", shared, allowed)
    pairs = zip(blocks[own:], kinds[own:], strict=True)
    return blocks[:own] + [_sharing(block, sources[kind]) for block, kind in pairs]


def _sharing(block: Block, source: int) -> Block:
    assert isinstance(block.mixer, Attention)
    # the values that it reads were normed, or made of keys, by the layer that wrote them
    mixer = replace(block.mixer, shares=source, value_norm=False, values_are_keys=False)
    return replace(block, mixer=mixer)


_MOST_STREAMS = 64
_LAYER_RULES = layer_rules(
    {
        "laurel.linear_left": "low_rank.left",
        "laurel.linear_right": "low_rank.right",
        "laurel.post_laurel_norm": "low_rank.norm",
        "altup.router_norm": "streams.norm",
        "altup.modality_router": "streams.router",
        "altup.prediction_coefs": "streams.predict",
        "altup.correction_coefs": "streams.correct",
    }
)


def _rules(d: Decoder) -> tuple[Rule, ...]:
    assert d.streams is not None
    ways = {"altup_projections": "enter", "altup_unembed_projections": "leave"}
    return (
        *SHARING_RULES,
        *_LAYER_RULES,
        rule(LAYER + "altup.correct_output_scale", "layers.{layer}.streams.scale"),
        *(
            rule(f"{{prefix}}{stored}.{i - 1}.weight", f"streams.{ours}.{i}.weight")
            for stored, ours in ways.items()
            for i in range(1, d.streams.count)
        ),
    )


def _describe_gemma3n(c: ConfigReader) -> Decoder:
    """Gemma 3n, text: several residual streams, inputs of each layer, sparse activations, norms of
    values, layers that share keys and values.
    """
    dim, norm = head_dim_of(c, 256), rms(c, 1e-6, "rms_late_cast")
    kinds, window = read_layer_types(c, lambda layer: (layer + 1) % 5), window_of(c, 512)
    inputs = layer_inputs_of(c, norm)
    if inputs is None:
        raise unsupported("hidden_size_per_layer_input", 0, "a positive integer")
    c.raw("query_pre_attn_scalar", None)  # scores are not scaled, whatever old files say
    attn = gemma_attention(c, dim, rope=None, scale=1.0, qk_norm=norm, value_norm=True)
    act = activation_of(c)
    block = Block(attn, None, norm, post=True, input_act=act)
    bases = {
        "full_attention": c.number("rope_theta", 1e6),
        "sliding_attention": c.number("rope_local_base_freq", 1e4),
    }
    ropes = read_ropes(c, dim, bases, context=context_of(c))
    blocks = with_ropes(with_windows(block, kinds, window), [ropes[kind] for kind in kinds])
    pairs = zip(blocks, _feeds(c, act), strict=True)
    blocks = [replace(layer, mlp=feed) for layer, feed in pairs]
    blocks = with_sharing(blocks, kinds, num_sharing_of(c, 15))
    return stack(c, blocks, layer_inputs=inputs, streams=_streams(c), **capped(c, 30.0))


def _streams(c: ConfigReader) -> Streams:
    for key in ("altup_coef_clip", "altup_lr_multiplier"):  # of training
        c.raw(key, None)
    c.only("altup_correct_scale", True)
    count = c.integer("altup_num_inputs", 4, minimum=2, maximum=_MOST_STREAMS)
    return Streams(
        count,
        active=c.integer("altup_active_idx", 0, minimum=0, maximum=count - 1),
        low_rank=c.integer("laurel_rank", 64),
    )


def _feeds(c: ConfigReader, act: Activation) -> list[Mlp]:
    """A width may be given for each layer, a sparsity is."""
    depth, width = num_layers_of(c), c.raw("intermediate_size", 16384)
    widths = width if isinstance(width, list) else [width] * depth
    if len(widths) != depth or not all(isinstance(w, int) and 0 < w < 10**9 for w in widths):
        raise unsupported("intermediate_size", width, "a positive integer, or one for each layer")
    # the default of transformers: ten sparse layers, in models that are deeper
    usual = [0.95 if depth > 10 and i < 10 else 0.0 for i in range(depth)]
    shares = c.raw("activation_sparsity_pattern", usual)
    is_list = isinstance(shares, list) and len(shares) == depth
    # the cut is a quantile of the normal distribution, which at 1 is infinite
    if not is_list or not all(is_number(share, 0.0, 0.9999) for share in shares):
        allowed = "a list with a number from 0 to below 1 for each layer"
        raise unsupported("activation_sparsity_pattern", shares, allowed)
    return [
        Mlp(width, act, sparsity=float(share)) for width, share in zip(widths, shares, strict=True)
    ]


GEMMA3N = Family(("Gemma3nForCausalLM",), _describe_gemma3n, _rules, ignored=UNUSED_TENSORS)
