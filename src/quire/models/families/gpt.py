"""GPT, and what follows it: GPT-2, GPT-BigCode, GPT-Neo, GPT-J and CodeGen."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    attention,
    context_of,
    head_dim_of,
    layer_norm,
    layer_rules,
    mlp,
    num_layers_of,
    stack,
    top_rules,
)
from quire.models.positions import Rope
from quire.models.rules import Family, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Norm

_LAYER, _OURS = "{prefix}h.{layer}.", "layers.{layer}."
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_MASKS = (r"h\.\d+\.attn\.(bias|masked_bias)",)
"""Causal masks that old files carry."""
_QKV = [f"{_OURS}attn.{part}." for part in "qkv"]
GPT2_RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    rule(_LAYER + "ln_1.{leaf}", _OURS + "attn_pre.{leaf}"),
    rule(_LAYER + "ln_2.{leaf}", _OURS + "mlp_pre.{leaf}"),
    rule(
        _LAYER + "attn.c_attn.weight",
        *(p + "weight" for p in _QKV),
        steps=("transpose", "split"),
    ),
    rule(_LAYER + "attn.c_attn.bias", *(p + "bias" for p in _QKV), steps=("split",)),
    *(
        form
        for stored, ours in (
            ("attn.c_proj.", "attn.o."),
            ("mlp.c_fc.", "mlp.up."),
            ("mlp.c_proj.", "mlp.down."),
        )
        for form in (
            rule(_LAYER + stored + "weight", _OURS + ours + "weight", steps=("transpose",)),
            rule(_LAYER + stored + "bias", _OURS + ours + "bias"),
        )
    ),
)


def _describe_gpt2(c: ConfigReader) -> Decoder:
    """GPT-2: learned positions, layer norms, biases everywhere, and weights stored input first."""
    c.only("n_ctx", c.integer("n_positions"))
    c.only("add_cross_attention", False)
    width, heads, depth = c.integer("n_embd"), c.integer("n_head"), num_layers_of(c, "n_layer")
    if width % heads:
        raise unsupported("n_head", heads, f"a divisor of n_embd={width}")
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    inner = c.integer("n_inner", 4 * width)
    feed = mlp(
        c, width=inner, act_key="activation_function", act="gelu_new", gated=False, bias=True
    )
    blocks = [Block(_attention(c, width // heads, i), feed, norm) for i in range(depth)]
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=width,
        blocks=tuple(blocks),
        final_norm=norm,
        context=c.integer("n_positions"),
        learned_positions=c.integer("n_positions"),
        tie=c.flag("tie_word_embeddings", True),
    )


def _attention(c: ConfigReader, head_dim: int, layer: int) -> Attention:
    heads = c.integer("n_head")
    scale = head_dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    if c.flag("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return Attention(heads, heads, head_dim, scale, qkv_bias=True, o_bias=True)


GPT2 = Family(
    ("GPT2LMHeadModel",),
    _describe_gpt2,
    GPT2_RULES,
    prefix="transformer.",
    ignored=_MASKS,
)


_OPENAI_GPT_RULES = (
    rule("{prefix}tokens_embed.weight", "embed.weight"),
    rule("{prefix}positions_embed.weight", "positions.weight"),
    rule(_LAYER + "ln_1.{leaf}", _OURS + "attn_post.{leaf}"),
    rule(_LAYER + "ln_2.{leaf}", _OURS + "mlp_post.{leaf}"),
    *GPT2_RULES,
)
# the "gelu" of this model's code is the approximation by tanh
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def _describe_openai_gpt(c: ConfigReader) -> Decoder:
    """GPT (2018): learned positions, norms after each sum, weights stored input first."""
    c.rename(n_positions="max_position_embeddings")
    c.only("n_ctx", c.integer("n_positions"))
    c.ignore("n_special", "predict_special_tokens")
    width, heads = c.integer("n_embd"), c.integer("n_head")
    if width % heads:
        raise unsupported("n_head", heads, f"a divisor of n_embd={width}")
    dim = width // heads
    norm = Norm("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    attn = Attention(heads, heads, dim, dim**-0.5, qkv_bias=True, o_bias=True)
    feed = Mlp(4 * width, c.choice("afn", _ACTIVATIONS, "gelu"), gated=False, bias=True)
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=width,
        blocks=(Block(attn, feed, norm, norms_sum=True),) * num_layers_of(c, "n_layer"),
        final_norm=None,
        context=c.integer("n_positions"),
        learned_positions=c.integer("n_positions"),
        tie=c.flag("tie_word_embeddings", True),
    )


OPENAI_GPT = Family(
    ("OpenAIGPTLMHeadModel",),
    _describe_openai_gpt,
    _OPENAI_GPT_RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.bias", "position_ids"),  # causal masks that old files carry
)


GPT_BIGCODE_RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    *layer_rules({"attn.c_attn": "attn.q attn.k attn.v"}, at=_LAYER, step="by_head"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            "attn.c_proj": "attn.o",
            "ln_2": "mlp_pre",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        at=_LAYER,
    ),
)


def _describe_gpt_bigcode(c: ConfigReader) -> Decoder:
    """GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key/value head for all queries."""
    c.rename(**_KEYS)
    heads = c.integer("num_attention_heads")
    kv_heads = 1 if c.flag("multi_query", True) else heads
    c.only("num_key_value_heads", kv_heads)
    c.only("scale_attn_weights", True)
    attn = attention(c, kv_heads=kv_heads, rope=None, qkv_bias=True, o_bias=True)
    width = c.integer("n_inner", 4 * c.integer("hidden_size"))
    act_key, act = "activation_function", "gelu_pytorch_tanh"
    feed = mlp(c, width=width, act_key=act_key, act=act, gated=False, bias=True)
    return stack(
        c,
        Block(attn, feed, layer_norm(c, "layer_norm_epsilon")),
        learned_positions=context_of(c),
        tie=c.flag("tie_word_embeddings", True),
    )


GPT_BIGCODE = Family(
    ("GPTBigCodeForCausalLM",),
    _describe_gpt_bigcode,
    GPT_BIGCODE_RULES,
    prefix="transformer.",
    ignored=_MASKS,
)


_GPT_NEO_RULES = (
    rule("{prefix}wpe.weight", "positions.weight"),
    *top_rules("wte", "ln_f"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            "ln_2": "mlp_pre",
            **{f"attn.attention.{part}_proj": f"attn.{part}" for part in "qkv"},
            "attn.attention.out_proj": "attn.o",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        at=_LAYER,
    ),
)
_OF_TRAINING = ("resid_dropout", "embed_dropout", "classifier_dropout")


def _describe_gpt_neo(c: ConfigReader) -> Decoder:
    """GPT-Neo: GPT-2 with windows in every other layer, unscaled scores, and plain linears."""
    c.rename(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    c.ignore(*_OF_TRAINING)
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if width % heads:
        raise unsupported("num_heads", heads, f"a divisor of hidden_size={width}")
    attn = Attention(heads, heads, width // heads, 1.0, o_bias=True)
    feed = mlp(
        c,
        width=c.integer("intermediate_size", 4 * width),
        act_key="activation_function",
        act="gelu_new",
        gated=False,
        bias=True,
    )
    block = Block(attn, feed, layer_norm(c, "layer_norm_epsilon"))
    windows = {"global": None, "local": c.integer("window_size", 256)}
    blocks = [replace(block, mixer=replace(attn, window=windows[kind])) for kind in _kinds(c)]
    return stack(
        c, blocks, learned_positions=context_of(c), tie=c.flag("tie_word_embeddings", True)
    )


def _kinds(c: ConfigReader) -> list[str]:
    """`attention_types`: lists of kinds, each with how often it is repeated."""
    given = c.raw("attention_types", [[["global", "local"], 12]])
    c.ignore("attention_layers")  # the same written out
    try:
        kinds = [kind for turn, count in given for _ in range(count) for kind in turn]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers_of(c) or not set(kinds) <= {"global", "local"}:
        allowed = "lists of global and local with their repetitions, one for each layer"
        raise unsupported("attention_types", given, allowed)
    return kinds


GPT_NEO = Family(
    ("GPTNeoForCausalLM",),
    _describe_gpt_neo,
    _GPT_NEO_RULES,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),  # masks that old files carry
)


GPTJ_RULES = (
    *top_rules("wte", "ln_f"),
    *layer_rules(
        {
            "ln_1": "attn_pre",
            **{f"attn.{part}_proj": f"attn.{part}" for part in "qkv"},
            "attn.out_proj": "attn.o",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
        },
        at=_LAYER,
    ),
)


def _describe_gptj(c: ConfigReader) -> Decoder:
    """GPT-J: parallel blocks with one layer norm, neighbours rotated in the first values of each
    head, biases in the feed-forward part and the head.
    """
    c.rename(**_KEYS)
    c.only("tie_word_embeddings", False)
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    dim = head_dim_of(c)
    turned = c.integer("rotary_dim", 64, minimum=2, maximum=dim)
    if turned % 2:
        raise unsupported("rotary_dim", turned, "an even number")
    # no key says the base, which is fixed in the model's code
    attn = attention(c, head_dim=dim, rope=Rope(1e4, turned, interleaved=True))
    width = c.integer("n_inner", 4 * c.integer("hidden_size"))
    block = Block(
        attn,
        mlp(c, width=width, act_key="activation_function", act="gelu_new", gated=False, bias=True),
        layer_norm(c, "layer_norm_epsilon"),
        parallel="one_norm",
    )
    return stack(c, block, head_bias=True)


GPTJ = Family(
    ("GPTJForCausalLM",),
    _describe_gptj,
    GPTJ_RULES,
    prefix="transformer.",
    ignored=_MASKS,
)

_PARTS = 4
"""Parts in which the projections of CodeGen's published models were trained."""


def _describe_codegen(c: ConfigReader) -> Decoder:
    """CodeGen: GPT-J with queries, values and keys in one tensor of four parts."""
    decoder = _describe_gptj(c)
    c.integer("n_ctx", None)  # the context again
    heads = c.integer("num_attention_heads")
    if heads % _PARTS:
        raise unsupported("n_head", heads, f"a multiple of {_PARTS}")
    return decoder


CODEGEN = Family(
    ("CodeGenForCausalLM",),
    _describe_codegen,
    (
        *layer_rules({"attn.qkv_proj": "attn.q attn.v attn.k"}, at=_LAYER, step="by_quarter"),
        *GPTJ_RULES,
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.causal_mask",),
)
