"""Families that are Llama but for a norm, an activation, a bias, a rotation, or names."""

from __future__ import annotations

from typing import Any

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    LAYER,
    RULES,
    attention,
    biases,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    norm_rules,
    num_layers_of,
    read_layer_types,
    rms,
    sliding_blocks,
    stack,
    top_rules,
    window_of,
    with_ropes,
    with_windows,
)
from quire.models.parameters import XIELU_PARTS
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, Mlp, Norm


def _describe_arcee(c: ConfigReader) -> Decoder:
    """Arcee (AFM): Llama with an ungated feed-forward part and squared relu."""
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", False))
    return stack(c, Block(attention(c, **biases(c)), feed, rms(c, 1e-5)))


ARCEE = Family(("ArceeForCausalLM",), _describe_arcee, RULES)


def _describe_helium(c: ConfigReader) -> Decoder:
    """Helium: Llama with neighbours rotated."""
    bias = c.flag("attention_bias", False)
    attn = attention(c, usual_dim=128, theta=1e5, interleaved=True, qkv_bias=bias)
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-8)))


HELIUM = Family(("HeliumForCausalLM",), _describe_helium, RULES)


def _describe_jais2(c: ConfigReader) -> Decoder:
    """Jais 2: Llama with layer norms, biases, and an ungated part with squared relu."""
    attn = attention(c, **biases(c, True))
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", True))
    return stack(c, Block(attn, feed, layer_norm(c)))


JAIS2 = Family(("Jais2ForCausalLM",), _describe_jais2, RULES)


def _describe_nemotron(c: ConfigReader) -> Decoder:
    """Nemotron 4 and Minitron: layer norms by 1 + weight, half-rotated heads, squared relu."""
    attn = attention(c, partial=0.5, **biases(c))
    feed = mlp(c, act="relu2", gated=False, bias=c.flag("mlp_bias", False))
    return stack(c, Block(attn, feed, layer_norm(c, "norm_eps", kind="layer1p")))


NEMOTRON = Family(("NemotronForCausalLM",), _describe_nemotron, RULES)


def _describe_iquestcoder(c: ConfigReader) -> Decoder:
    """IQuest-Coder: Llama with heads of 128 values."""
    c.only("clip_qkv", None)
    c.only("use_sliding_window", False)
    c.ignore("sliding_window", "max_window_layers")  # of windows, which are switched off
    attn = attention(c, usual_dim=128, **biases(c))
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-5)))


IQUESTCODER = Family(("IQuestCoderForCausalLM",), _describe_iquestcoder, RULES)


def _describe_cwm(c: ConfigReader) -> Decoder:
    """CWM: Llama 3 with windows in three of four layers."""
    if "rope_scaling" not in c and "rope_parameters" not in c:
        raise LoadError("config.json lacks rope_scaling, which CWM needs.")
    attn = attention(c, usual_dim=128, theta=1e6)
    block = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-5))
    return stack(c, sliding_blocks(c, block, lambda i: i % 4, window_of(c, 8192)))


CWM = Family(("CwmForCausalLM",), _describe_cwm, RULES)


def _describe_seed_oss(c: ConfigReader) -> Decoder:
    """Seed-OSS: Llama with a bias on q, k and v and a switch of its own for that of the output."""
    attn = attention(
        c,
        usual_dim=128,
        qkv_bias=c.flag("attention_bias", True),
        o_bias=c.flag("attention_out_bias", False),
    )
    return stack(c, Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-6)))


SEED_OSS = Family(("SeedOssForCausalLM",), _describe_seed_oss, RULES)


_LLAMA_LIKE_RULES = (*layer_rules({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}), *RULES)


def _describe_starcoder2(c: ConfigReader) -> Decoder:
    """StarCoder2: Llama's attention with layer norms, biases and a plain gelu feed-forward part."""
    c.only("mlp_type", "default")
    c.only("norm_type", "layer_norm")
    bias = c.flag("use_bias", True)
    window = window_of(c)
    attn = attention(c, window=window, qkv_bias=bias, o_bias=bias)
    feed = mlp(c, act="gelu_pytorch_tanh", gated=False, bias=bias)
    norm = Norm("layer", c.number("norm_epsilon", 1e-5), bias=True)
    return stack(c, Block(attn, feed, norm), tie=c.flag("tie_word_embeddings", True))


STARCODER2 = Family(("Starcoder2ForCausalLM",), _describe_starcoder2, _LLAMA_LIKE_RULES)


def _describe_stablelm(c: ConfigReader) -> Decoder:
    """StableLM: layer norms, partial rotation, sequential blocks or parallel ones with one norm; in
    the largest a norm of each query and key head.
    """
    norms: dict[str, Any] = {}
    if c.flag("qk_layernorm", False):
        norms = {"qk_norm": layer_norm(c, bias=False), "qk_norm_over": "heads_apart"}
    attn = attention(c, partial=0.25, qkv_bias=c.flag("use_qkv_bias", False), **norms)
    is_parallel = c.flag("use_parallel_residual", False)
    block = Block(attn, mlp(c), layer_norm(c), parallel="one_norm" if is_parallel else "no")
    return stack(c, block)


STABLELM = Family(
    ("StableLmForCausalLM",),
    _describe_stablelm,
    (
        *(
            rule(
                f"{LAYER}self_attn.{part}_layernorm.norms.{{expert}}.{{leaf}}",
                f"layers.{{layer}}.attn.{part}_norm.{{expert}}.{{leaf}}",
            )
            for part in "qk"
        ),
        *RULES,
    ),
)


def _describe_hyperclovax(c: ConfigReader) -> Decoder:
    """HyperCLOVA X: Granite with norms after the sub-layers, too."""
    dim = head_dim_of(c)
    scale = c.number("attention_multiplier", dim**-0.5)
    block = Block(
        attention(c, head_dim=dim, scale=scale, **biases(c)),
        mlp(c, bias=c.flag("mlp_bias", False)),
        rms(c, 1e-6),
        post=c.flag("use_post_norm", True),
        residual_scale=c.number("residual_multiplier", 1.0),
    )
    return stack(
        c,
        block,
        embed_scale=c.number("embedding_multiplier", 1.0),
        logit_scale=c.number("logits_scaling", 1.0),
    )


_POST_NORM_RULES = norm_rules(attn_post="post_norm1", mlp_post="post_norm2")
HYPERCLOVAX = Family(
    ("HyperCLOVAXForCausalLM",), _describe_hyperclovax, RULES + _POST_NORM_RULES, scales_given=True
)


def _describe_smollm3(c: ConfigReader) -> Decoder:
    """SmolLM3: Llama without rotation in every fourth layer."""
    c.raw("max_window_layers", None)  # says nothing where layer types are listed or follow
    attn = attention(c, theta=2e6, **biases(c))
    block = Block(attn, mlp(c, bias=c.flag("mlp_bias", False)), rms(c, 1e-6))
    rotated = _rotated(c)
    blocks = _windowed(c, block, rotated)
    blocks = with_ropes(blocks, [attn.rope if turns else None for turns in rotated])
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True))


def _rotated(c: ConfigReader) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer that does rotate."""
    every = c.integer("no_rope_layer_interval", 4)
    depth = num_layers_of(c)
    flags = c.raw("no_rope_layers", [int((i + 1) % every != 0) for i in range(depth)])
    if not isinstance(flags, list) or len(flags) != depth or not all(f in (0, 1) for f in flags):
        raise unsupported("no_rope_layers", flags, "a list with 0 or 1 per layer")
    return [bool(flag) for flag in flags]


def _windowed(c: ConfigReader, block: Block, rotated: list[bool]) -> list[Block]:
    """Blocks with windows, where they are switched on, in the layers that do not rotate."""
    window = window_of(c)
    is_on = c.flag("use_sliding_window", False) and window is not None
    kinds = read_layer_types(c, lambda layer: is_on and not rotated[layer])
    return with_windows(block, kinds, window) if is_on else [block] * len(kinds)


SMOLLM3 = Family(("SmolLM3ForCausalLM",), _describe_smollm3, RULES)


_RULES_2 = (
    *top_rules("tok_embeddings", "norm", "output"),
    *layer_rules({"attention.wqkv": "attn.q attn.k attn.v"}, step="by_head"),
    *layer_rules(
        {
            "attention_norm": "attn_pre",
            "attention.wo": "attn.o",
            "ffn_norm": "mlp_pre",
            "feed_forward.w1": "mlp.gate",
            "feed_forward.w3": "mlp.up",
            "feed_forward.w2": "mlp.down",
        }
    ),
)


def _describe_2(c: ConfigReader) -> Decoder:
    """InternLM 2: Llama with q, k and v stored as one tensor by key/value heads."""
    bias = c.flag("bias", True)
    attn = attention(c, qkv_bias=bias, o_bias=bias)
    return stack(c, Block(attn, mlp(c), rms(c, 1e-6)))


def _describe_3(c: ConfigReader) -> Decoder:
    """InternLM 3: Llama with keys of its own for its biases."""
    c.rename(attention_bias="qkv_bias", mlp_bias="bias")
    bias = c.flag("attention_bias", False)
    c.only("mlp_bias", bias)
    attn = attention(c, usual_dim=128, **biases(c))
    return stack(c, Block(attn, mlp(c, bias=bias), rms(c, 1e-5)))


INTERNLM2 = Family(("InternLM2ForCausalLM",), _describe_2, _RULES_2, oracle="reference")
INTERNLM3 = Family(("InternLM3ForCausalLM",), _describe_3, RULES)


def _number_rule(part: str) -> Rule:
    """The learned numbers are stored as lists of one, the others without an axis."""
    stored, ours = f"mlp.act_fn.{part}", f"layers.{{layer}}.mlp.xielu.{part}"
    return rule(LAYER + stored, ours, steps=() if part.startswith("alpha") else ("scalar",))


_APERTUS_RULES = (
    *(_number_rule(part) for part in XIELU_PARTS),
    *norm_rules(attn_pre="attention_layernorm", mlp_pre="feedforward_layernorm"),
    *RULES,
)


def _describe_apertus(c: ConfigReader) -> Decoder:
    """Apertus: a norm over each query and key head, and an ungated feed-forward part with xIELU."""
    c.only("hidden_act", "xielu")
    c.only("mlp_bias", False)
    c.only("post_norm", False)
    c.only("qk_norm", True)
    # absent, transformers takes a llama3 scaling of its own; a rotation is too much to assume
    # silently
    if "rope_scaling" not in c and "rope_parameters" not in c:
        raise LoadError("config.json lacks rope_scaling, which Apertus needs.")
    norm = rms(c, 1e-5)
    attn = attention(c, theta=12e6, qk_norm=norm, **biases(c))
    return stack(c, Block(attn, Mlp(c.integer("intermediate_size"), "xielu", gated=False), norm))


def _describe_1p5(c: ConfigReader) -> Decoder:
    """The text of Apertus 1.5, whose head has all tokens."""
    c.only("output_vocab_size", c.integer("vocab_size"))
    return _describe_apertus(c)


APERTUS = Family(("ApertusForCausalLM",), _describe_apertus, _APERTUS_RULES)
APERTUS_1P5 = Family(("Apertus1p5TextForCausalLM",), _describe_1p5, _APERTUS_RULES)
