"""Encoders of T5, mT5 and UMT5: no positions but numbers that are added to scores by the distance
between tokens, which UMT5 has in each layer; RMS norms before the parts, no scale of scores.
"""

from __future__ import annotations

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.encoders import CLASSIFIER_RULES, pooling_family
from quire.models.families.llama import ACTIVATIONS, layer_rules, stack
from quire.models.pooling.keys import read_classifier
from quire.models.pooling.spec import PoolerSpec
from quire.models.positions import BucketBias
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

_BLOCK = "{prefix}encoder.block.{layer}.layer."
_BIAS = "0.SelfAttention.relative_attention_bias.weight"
_LAYER_RULES = layer_rules(
    {
        **{f"0.SelfAttention.{part}": f"attn.{part}" for part in "qkvo"},
        "0.layer_norm": "attn_pre",
        "1.layer_norm": "mlp_pre",
        "1.DenseReluDense.wo": "mlp.down",
    },
    at=_BLOCK,
)
_INNER = "1.DenseReluDense."
_GATED = layer_rules({_INNER + "wi_0": "mlp.gate", _INNER + "wi_1": "mlp.up"}, at=_BLOCK)
_PLAIN = layer_rules({_INNER + "wi": "mlp.up"}, at=_BLOCK)
_OF_DECODERS = (
    *("is_encoder_decoder", "num_decoder_layers", "tie_word_embeddings", "decoder_start_token_id"),
    *("initializer_factor", "dropout_rate", "scale_decoder_outputs"),
)
"""Keys of the decoder that the checkpoint was trained with, and of training."""
_LEAST_BUCKETS = 4


def _describe(c: ConfigReader, act: str, is_shared: bool) -> Decoder:
    c.rename(
        hidden_size="d_model",
        num_attention_heads="num_heads",
        num_hidden_layers="num_layers",
        head_dim="d_kv",
    )
    c.ignore(*_OF_DECODERS)
    c.only("is_decoder", False)
    heads, dim = c.integer("num_attention_heads"), c.integer("head_dim", 64)
    distances = BucketBias(
        c.integer("relative_attention_num_buckets", 32, minimum=_LEAST_BUCKETS),
        c.integer("relative_attention_max_distance", 128),
        is_shared,
    )
    # far distances are shared out by a logarithm with base max_distance / (buckets / 4), which has
    # to be above 1
    if distances.max_distance <= distances.buckets // 4:
        allowed = f"more than a quarter of {distances.buckets} buckets"
        raise unsupported("relative_attention_max_distance", distances.max_distance, allowed)
    attn = Attention(heads, heads, dim, 1.0, is_causal=False, distances=distances)
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-6))
    return stack(
        c,
        Block(attn, _mlp(c, act), norm),
        context=c.integer("n_positions", None),
        tie=False,
    )


def _mlp(c: ConfigReader, default: str) -> Mlp:
    """`feed_forward_proj` names an activation, or after "gated-" one of gates; gelu is tanh's."""
    names = {act: (ours, False) for act, ours in ACTIVATIONS.items()}
    names |= {f"gated-{act}": (ours, True) for act, ours in ACTIVATIONS.items()}
    names["gated-gelu"] = ("gelu_tanh", True)
    act, is_gated = c.choice("feed_forward_proj", names, default)
    c.ignore("dense_act_fn", "is_gated_act")  # which transformers writes, and derives anew
    return Mlp(c.integer("d_ff"), act, gated=is_gated)


def _rules(decoder: Decoder) -> tuple[Rule, ...]:
    first = decoder.blocks[0]
    assert isinstance(first.mixer, Attention) and isinstance(first.mixer.distances, BucketBias)
    assert isinstance(first.mlp, Mlp), "no experts"
    bias = rule(_BLOCK + _BIAS, "layers.{layer}.attn.distances.weight")
    if first.mixer.distances.is_shared:
        bias = rule(_BLOCK.format(prefix="{prefix}", layer=0) + _BIAS, "distances.weight")
    return (
        rule("{prefix}shared.weight", "embed.weight"),
        rule("{prefix}encoder.final_layer_norm.{leaf}", "norm.{leaf}"),
        bias,
        *_LAYER_RULES,
        *(_GATED if first.mlp.gated else _PLAIN),
    )


def _embed(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("embed", "token_embed"), pooling="mean")


def _classify_tokens(c: ConfigReader) -> PoolerSpec:
    return PoolerSpec(("token_classify",), classifier=read_classifier(c))


def _forms(stem: str, act: str, *, is_shared: bool = True) -> tuple[Family, Family]:
    family = Family(
        (),
        lambda c: _describe(c, act, is_shared),
        _rules,
        prefix="transformer.",
        ignored=(r"encoder\.embed_tokens\.weight", r"decoder\..*", r"lm_head\..*"),
        other_ends=(("shared.weight", "encoder.embed_tokens.weight"),),
    )
    return (
        pooling_family(family, (f"{stem}EncoderModel",), _embed, ()),
        pooling_family(
            family, (f"{stem}ForTokenClassification",), _classify_tokens, CLASSIFIER_RULES
        ),
    )


T5 = _forms("T5", "relu")
MT5 = _forms("MT5", "gated-gelu")
UMT5 = _forms("UMT5", "gated-gelu", is_shared=False)
