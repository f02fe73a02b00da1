"""Llama, and the vocabulary in which the other families say what differs from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from quire.errors import LoadError
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.positions import Rope
from quire.models.rope_config import read_rope
from quire.models.rules import Family, Rule, Step, rule
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe, Norm

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    # three names of transformers for the one approximation by tanh
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

LAYER = "{prefix}layers.{layer}."


def top_rules(embed: str, norm: str, head: str = "lm_head") -> tuple[Rule, ...]:
    """Rules of the embedding, the final norm and the head, as the checkpoint calls them."""
    return (
        rule(f"{{prefix}}{embed}.{{leaf}}", "embed.{leaf}"),
        rule(f"{{prefix}}{norm}.{{leaf}}", "norm.{leaf}"),
        rule(f"{head}.{{leaf}}", "head.{leaf}"),
    )


EMBEDDING_RULES = top_rules("embed_tokens", "norm")


def layer_rules(
    names: Mapping[str, str], at: str = LAYER, step: Step = "split"
) -> tuple[Rule, ...]:
    """Rules of the parts of a layer: the checkpoint's name = the canonical name, or several names
    with blanks between for a tensor that `step` divides. All hold a weight or a bias.
    """
    rules = []
    for stored, ours in names.items():
        targets = [f"layers.{{layer}}.{part}.{{leaf}}" for part in ours.split()]
        steps = (step,) if len(targets) > 1 else ()
        rules.append(rule(f"{at}{stored}.{{leaf}}", *targets, steps=steps))
    return tuple(rules)


def norm_rules(**places: str) -> tuple[Rule, ...]:
    """Rules of the norms in a layer: canonical name = what the checkpoint calls it."""
    return layer_rules({stored: ours for ours, stored in places.items()})


ATTENTION_RULES = layer_rules(
    {
        **{f"self_attn.{part}_proj": f"attn.{part}" for part in "qkvo"},
        **{f"self_attn.{part}_norm": f"attn.{part}_norm" for part in "qk"},
    }
)
MLP_RULES = layer_rules({f"mlp.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")})
PRE_NORM_RULES = norm_rules(attn_pre="input_layernorm", mlp_pre="post_attention_layernorm")
RULES = EMBEDDING_RULES + ATTENTION_RULES + MLP_RULES + PRE_NORM_RULES


_MOST_LAYERS = 4096
"""Most layers, twenty times the deepest models'; each takes memory before any weights."""

_MOST_EXPERTS = 2**17
"""Most experts of all layers together."""


def num_layers_of(c: ConfigReader, key: str = "num_hidden_layers") -> int:
    """The number of layers that the config declares."""
    layers: int = c.integer(key, maximum=_MOST_LAYERS)
    return layers


def num_experts_of(c: ConfigReader, key: str) -> int:
    """The number of experts in each layer that has some."""
    experts: int = c.integer(key, maximum=most_experts(c))
    return experts


def most_experts(c: ConfigReader, layers_key: str = "num_hidden_layers") -> int:
    """The most experts of a layer."""
    return _MOST_EXPERTS // num_layers_of(c, layers_key)


def context_of(c: ConfigReader) -> int:
    """The number of positions that the config declares."""
    context: int = c.integer("max_position_embeddings")
    return context


def biases(c: ConfigReader, default: bool = False) -> dict[str, Any]:
    """The biases of attention that one switch is for."""
    has_bias = c.flag("attention_bias", default)
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def attention(
    c: ConfigReader,
    *,
    head_dim: int | None = None,
    usual_dim: int | None = None,
    theta: float = 1e4,
    partial: float = 1.0,
    interleaved: bool = False,
    rope_facts: Mapping[str, Any] = MappingProxyType({}),
    **facts: Any,
) -> Attention:
    """Llama's attention with what differs as keywords. Without a `head_dim` the config says it, or
    else it is the family's `usual_dim`. Without `rope` it is read, with `theta` as the family's
    base, `partial` as its share of a head that is rotated, and further keywords of `read_rope`.
    """
    if head_dim is None:
        head_dim = head_dim_of(c, usual_dim)
    if "rope" not in facts:
        given = {"theta": theta, "partial": partial, "interleaved": interleaved, **rope_facts}
        facts["rope"] = read_rope(c, head_dim, context=context_of(c), **given)
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise unsupported("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    return Attention(
        **{
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            **facts,
        }
    )


def head_dim_of(c: ConfigReader, default: int | None = None) -> int:
    """`head_dim`, or the hidden width shared out over the heads; `default` is the family's own."""
    dim: int | None = c.integer("head_dim", default)
    if dim is None:
        width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        dim = width // heads
        if width % heads:
            allowed = f"a divisor of hidden_size={width}, unless head_dim is given"
            raise unsupported("num_attention_heads", heads, allowed)
    if dim % 2:
        raise unsupported("head_dim", dim, "an even number")
    return dim


def mlp(
    c: ConfigReader,
    *,
    width: int | None = None,
    act_key: str = "hidden_act",
    act: str = "silu",
    **facts: Any,
) -> Mlp:
    """Llama's gated feed-forward part and its differences. `width` None: `intermediate_size`."""
    if width is None:
        width = c.integer("intermediate_size")
    return Mlp(width, c.choice(act_key, ACTIVATIONS, act), **facts)


def with_ropes(blocks: Iterable[Block], ropes: Iterable[Rope | None]) -> list[Block]:
    """The blocks with these rotations in their attention."""
    found = []
    for block, rope in zip(blocks, ropes, strict=True):
        assert isinstance(block.mixer, Attention), "only attention rotates"
        found.append(replace(block, mixer=replace(block.mixer, rope=rope)))
    return found


def stack(c: ConfigReader, blocks: Block | list[Block], **facts: Any) -> Decoder:
    """A decoder of these blocks, or one for every layer; shared keys, differences as keywords."""
    if isinstance(blocks, Block):
        blocks = [blocks] * num_layers_of(c)
    context = facts["context"] if "context" in facts else context_of(c)
    return Decoder(
        **{
            "vocab": c.integer("vocab_size"),
            "dim": c.integer("hidden_size"),
            "blocks": tuple(_trim_window(block, context) for block in blocks),
            "final_norm": blocks[0].norm,
            "context": context,
            "tie": c.flag("tie_word_embeddings", False),
            **facts,
        }
    )


def rms(c: ConfigReader, eps: float, kind: Any = "rms") -> Norm:
    """The family's RMS norm; `eps` is what an absent `rms_norm_eps` means."""
    return Norm(kind, c.number("rms_norm_eps", eps))


def layer_norm(c: ConfigReader, key: str = "layer_norm_eps", **facts: Any) -> Norm:
    """The family's layer norm, with weight and bias unless `facts` say otherwise."""
    return Norm(**{"kind": "layer", "eps": c.number(key, 1e-5), "bias": True, **facts})


def read_layer_types(c: ConfigReader, slides: Callable[[int], object]) -> list[str]:
    """`layer_types`, one of full_attention and sliding_attention per layer. Without that key those
    layers slide of which `slides` is true.
    """
    layers = range(num_layers_of(c))
    usual = ["sliding_attention" if slides(layer) else "full_attention" for layer in layers]
    return read_kinds(c, "layer_types", ("full_attention", "sliding_attention"), usual)


def read_kinds(c: ConfigReader, key: str, known: Iterable[str], *default: Any) -> list[str]:
    """A type per layer, which is one of `known`; the key is needed unless there is a default."""
    kinds = c.raw(key, *default)
    if not isinstance(kinds, list) or len(kinds) != num_layers_of(c):
        raise unsupported(key, kinds, "a list with one type per layer")
    for kind in kinds:
        if kind not in known:
            raise unsupported(key, kind, ", ".join(known))
    return kinds


def read_flags(c: ConfigReader, key: str, default: list[bool]) -> list[bool]:
    """Whether a key of numbers has a 1, for each layer; without it the default."""
    numbers = c.raw(key, default)
    is_list = isinstance(numbers, list) and len(numbers) == len(default)
    if not is_list or any(number not in (0, 1) for number in numbers):
        raise unsupported(c.at(key), numbers, "a list with 0 or 1 for each layer")
    return [number == 1 for number in numbers]


def window_of(c: ConfigReader, absent: int | None = None) -> int | None:
    """`sliding_window`; null means none, `absent` is what a missing key means to the family."""
    window = c.bound("sliding_window", absent)
    if window is not None and (window < 1 or window % 1):
        raise unsupported("sliding_window", window, "a positive integer or null")
    return None if window is None else int(window)


def with_windows(block: Block, kinds: list[str], window: int | None) -> list[Block]:
    """The block for each layer type: sliding layers see `window` tokens, full ones everything."""
    if window is None and "sliding_attention" in kinds:
        raise LoadError("config.json has sliding_attention layers but no sliding_window.")
    seeing = {"full_attention": None, "sliding_attention": window}
    mixer = block.mixer
    assert isinstance(mixer, Attention), "windows are for keys and values"
    return [replace(block, mixer=replace(mixer, window=seeing[kind])) for kind in kinds]


def sliding_blocks(
    c: ConfigReader,
    block: Block,
    slides: Callable[[int], object],
    window: int | None,
    ropes: Mapping[str, Rope | None] | None = None,
) -> list[Block]:
    """The block of each layer by its type (`read_layer_types`): with or without `window`, and where
    rotations differ with that of the type.
    """
    kinds = read_layer_types(c, slides)
    blocks = with_windows(block, kinds, window)
    return blocks if ropes is None else with_ropes(blocks, [ropes[kind] for kind in kinds])


def _trim_window(block: Block, context: int) -> Block:
    """A window that hides nothing is taken off: the layer shares the full layers' KV group."""
    mixer = block.mixer
    if not isinstance(mixer, Attention):
        return block
    if mixer.window is not None and mixer.window >= context:
        mixer = replace(mixer, window=None)
    if mixer.chunk is not None and mixer.chunk >= context:
        mixer = replace(mixer, chunk=None)
    return replace(block, mixer=mixer)


def _describe(c: ConfigReader) -> Decoder:
    return describe_llama(c, is_causal=c.flag("is_causal", True))


def describe_llama(c: ConfigReader, *, is_causal: bool, eps: float = 1e-6) -> Decoder:
    """Llama; unless it `is_causal`, tokens see those after them. `eps`: if the config has none."""
    attn = attention(c, is_causal=is_causal, **biases(c))
    feed: Mlp | Moe = mlp(c, bias=c.flag("mlp_bias", False))
    return stack(c, Block(attn, feed, rms(c, eps)))


FAMILY = Family(("LlamaForCausalLM", "LLaMAForCausalLM"), _describe, RULES)
EMU3 = Family(("Emu3ForCausalLM",), lambda c: describe_llama(c, is_causal=True, eps=1e-5), RULES)
