"""Common parts of Gemma 3n and Gemma 4: layers that read the keys and values of an earlier one,
and inputs of their own for every layer.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.gemma import SANDWICH_RULES
from quire.models.families.llama import ACTIVATIONS, layer_rules, num_layers_of
from quire.models.rules import rule
from quire.models.spec import Activation, Attention, Block, LayerInputs, Norm

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
