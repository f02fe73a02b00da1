"""Cohere 1 and 2, and Cohere 2 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import (
    RULES,
    attention,
    biases,
    layer_norm,
    mlp,
    num_layers_of,
    read_layer_types,
    rms,
    sliding_blocks,
    stack,
    window_of,
    with_windows,
)
from quire.models.families.mixtures import (
    QWEN_RULES,
    experts_of,
    shared_expert,
    shared_rules,
    sparse_by_type,
)
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder, Moe


def _block(c: ConfigReader, **facts: Any) -> Block:
    attn = attention(c, theta=5e5, interleaved=True, **biases(c), **facts)
    return Block(attn, mlp(c), layer_norm(c, bias=False), parallel="one_norm")


def top_of(c: ConfigReader) -> dict[str, Any]:
    """The factor of logits, and whether the head is the embedding."""
    return {
        "logit_scale": c.number("logit_scale", 0.0625),
        "tie": c.flag("tie_word_embeddings", True),
    }


def _describe_1(c: ConfigReader) -> Decoder:
    """Cohere: parallel blocks with a layer norm without bias, neighbours rotated, scaled logits."""
    norm = layer_norm(c, bias=False) if c.flag("use_qk_norm", False) else None
    return stack(c, _block(c, qk_norm=norm, qk_norm_over="per_head"), **top_of(c))


def _describe_2(c: ConfigReader) -> Decoder:
    """Cohere 2: Cohere with windows, and no rotation in the layers that see everything."""
    _check_original_keys(c)
    every = c.integer("sliding_window_pattern", 4)
    block = _block(c)
    assert isinstance(block.mixer, Attention)
    ropes = {"sliding_attention": block.mixer.rope, "full_attention": None}
    window = window_of(c, 4096)
    blocks = sliding_blocks(c, block, lambda layer: (layer + 1) % every, window, ropes)
    return stack(c, blocks, **top_of(c))


def _check_original_keys(c: ConfigReader) -> None:
    """The first files say of themselves what the family is."""
    c.only("layer_switch", c.integer("sliding_window_pattern", 4))
    c.only("order_of_interleaved_layers", "local_attn_first")
    c.only("position_embedding_type", "rope_gptj")
    c.only("rotary_pct", 1.0)
    c.only("use_embedding_sharing", c.flag("tie_word_embeddings", True))
    for key in ("use_gated_activation", "use_parallel_block"):
        c.only(key, True)
    for key in ("use_parallel_embedding", "use_qk_norm"):
        c.only(key, False)


COHERE = Family(("CohereForCausalLM",), _describe_1, RULES)
COHERE2 = Family(("Cohere2ForCausalLM",), _describe_2, RULES)


_SCORES = {"softmax": "softmax_topk", "sigmoid": "sigmoid"}
_SHARES = {"sum": 1.0, "average": 0.5}


def _describe_cohere2_moe(c: ConfigReader) -> Decoder:
    """Cohere 2 with experts, perhaps averaged with shared ones, after dense layers that rotate."""
    depth = num_layers_of(c)
    num_dense = c.integer("first_k_dense_replace", 0, minimum=0, maximum=depth)
    every_dense = c.integer("prefix_dense_sliding_window_pattern", 1)
    every = c.integer("sliding_window_pattern", 4)

    def slides(layer: int) -> bool:
        if layer < num_dense:
            return bool((layer + 1) % every_dense)
        return bool((layer - num_dense + 1) % every)

    kinds = read_layer_types(c, slides)
    sparse = sparse_by_type(c, [layer >= num_dense for layer in range(depth)])
    norm = layer_norm(c, bias=False)
    norm = rms(c, 1e-6) if "rms_norm_eps" in c else norm
    attn = attention(c, usual_dim=128, interleaved=True, **biases(c))
    width = c.integer("prefix_dense_intermediate_size", None) or c.integer("intermediate_size")
    dense, window, share = mlp(c, width=width), window_of(c, 4096), _share(c)
    experts = _experts(c, share)
    blocks = []
    for kind, is_sparse in zip(kinds, sparse, strict=True):
        rotates = kind == "sliding_attention" or (not is_sparse and every_dense == 1)
        mixer = attn if rotates else replace(attn, rope=None)
        block = Block(mixer, experts if is_sparse else dense, norm, parallel="one_norm")
        blocks += with_windows(block, [kind], window)
    # an average of both sums: the half of the chosen experts is the mixture's scale, that of the
    # shared ones is in their last weights
    return stack(c, blocks, leaf_scales=(("mlp.shared.down.weight", share),), **top_of(c))


def _share(c: ConfigReader) -> float:
    """Shares of the sum that the chosen experts and the shared ones are."""
    share: float = c.choice("shared_expert_combination_strategy", _SHARES, "average")
    return share if c.integer("num_shared_experts", 0, minimum=0) else 1.0


def _experts(c: ConfigReader, share: float) -> Moe:
    width, num_shared = (
        c.integer("intermediate_size"),
        c.integer("num_shared_experts", 0, minimum=0),
    )
    return experts_of(
        c,
        "num_experts",
        width=width,
        score=c.choice("expert_selection_fn", _SCORES, "softmax"),
        renorm=c.flag("norm_topk_prob", True),
        scale=share,
        shared=shared_expert(c, width * num_shared) if num_shared else None,
    )


COHERE2_MOE = Family(
    ("Cohere2MoeForCausalLM",),
    _describe_cohere2_moe,
    (*shared_rules("mlp.shared_experts"), *QWEN_RULES, *RULES),
)
