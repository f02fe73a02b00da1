"""A published config.json in small: the same keys, with sizes that a test can afford."""

from __future__ import annotations

import copy
from typing import Any

VOCAB = 128
_WIDTHS = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "share_expert_dim": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "swa_v_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "laurel_rank": 8,
    "depth": 1,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "embed_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_head_dim": 16,
    "patch_size": 4,
    "image_size": 16,
}
"""Keys that get these values where they are larger."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "experts_per_token", "moe_topk", "moe_k")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "embed_dim")
_AS_HIDDEN = ("word_embed_proj_dim", "conv_dim", "conv_dim_out", "block_dim")
_PERIODS = (
    *("full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval"),
    *("interleave_moe_layer_step", "decoder_sparse_step", "attn_layer_period"),
)
_PARTS = ("vision_config", "audio_config", "text_config", "llm_config", "thinker_config")
_FEW_HEADS, _MOST_LAYERS = 4, 12


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a few small layers, which are those at its beginning; no quantisation."""
    small = _without_large(copy.deepcopy(config))
    for part in _PARTS:
        if isinstance(small.get(part), dict):
            small[part] = shrunk(small[part])
    small.pop("quantization_config", None)
    small["torch_dtype"] = small["dtype"] = "float32"
    small.setdefault("pad_token_id", 1)
    _shrink_layers(small)
    _shrink_heads(small)
    _shrink_experts(small)
    _shrink_blocks(small)
    for key, value in small.items():
        if key.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[key] = min(value, 1)
        elif key.endswith("token_id") and isinstance(value, list):
            small[key] = [1, 2]
    return small


def _without_large(config: dict[str, Any]) -> dict[str, Any]:
    experts = config.get("moe_intermediate_size")
    widths = dict(_WIDTHS)
    if isinstance(experts, list):  # of Hunyuan, whose experts are as wide as its dense parts
        widths["moe_intermediate_size"] = widths["intermediate_size"]
    for key, width in widths.items():
        value = config.get(key)
        if key == "intermediate_size" and "d_inner" in config:
            continue  # of Mamba, where it follows from others
        if isinstance(value, list):
            config[key] = [min(each, width) for each in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            config[key] = min(value, width)
    for key in ("vocab_size", "padded_vocab_size"):
        if key in config:
            config[key] = VOCAB
    return config


def _shrink_layers(config: dict[str, Any]) -> None:
    """Keep the layers up to the first of every kind, and the same number again."""
    key = next((key for key in _LAYERS if config.get(key)), None)
    pattern = config.get("hybrid_override_pattern")
    names = ("layers_block_type", "layer_types")
    lists = [config[name] for name in names if isinstance(config.get(name), list)]
    depth = config[key] if key else len(lists[0]) if lists else 0
    if not depth:
        return
    per_layer = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == depth}
    if isinstance(pattern, str):
        per_layer["hybrid_override_pattern"] = pattern
    kinds = [tuple(str(each[i]) for each in per_layer.values()) for i in range(depth)]
    least = max(kinds.index(kind) for kind in set(kinds)) + 1
    periods = [config.get(name) or 1 for name in _PERIODS]
    least = max([least, *(len(each) if isinstance(each, str) else each for each in periods)])
    dense = config.get("first_k_dense_replace")
    if isinstance(dense, int):
        config["first_k_dense_replace"] = dense = min(dense, 1)
        least = max(least, dense + 1)
    few = min(depth, max(2, 2 * least), max(_MOST_LAYERS, least))
    config |= {name: few for name in _LAYERS if config.get(name) == depth}
    for name, value in per_layer.items():
        config[name] = value[:few]
    if isinstance(config.get("moe_layer_end_index"), int):
        config["moe_layer_end_index"] = min(config["moe_layer_end_index"], few - 1)
    if config.get("num_kv_shared_layers"):
        config["num_kv_shared_layers"] = few // 2
    if isinstance(config.get("max_window_layers"), int):
        config["max_window_layers"] = min(config["max_window_layers"], few)
    own = config.get("per_layer_config")
    if own:
        config["per_layer_config"] = {k: _own_layer(v) for k, v in own.items() if int(k) < few}


def _own_layer(own: dict[str, Any]) -> dict[str, Any]:
    small = {"head_dim": 32, "num_key_value_heads": 1}
    return {key: small.get(key, value) for key, value in own.items()}


def _shrink_heads(config: dict[str, Any]) -> None:
    key = next((key for key in _HEADS if isinstance(config.get(key), int)), None)
    if key is None:
        return
    heads = config[key]
    few = min(heads, _FEW_HEADS)
    for name in _HEADS:
        if isinstance(config.get(name), int):
            config[name] = few
    for name in (*_KV_HEADS, "num_global_key_value_heads", "multi_query_group_num"):
        if isinstance(value := config.get(name), int):
            config[name] = few if value >= heads else max(1, min(2, value))
    if "swa_num_key_value_heads" in config:
        config["swa_num_key_value_heads"] = 2 * config["num_key_value_heads"]
    dim = _head_dim(config)
    for name in ("head_dim", "attention_head_dim", "kv_channels", "swa_head_dim"):
        if isinstance(config.get(name), int):
            config[name] = dim
    if "attention_head_dim" in config:
        config["head_dim"] = dim  # which is the usual width in the file
    if isinstance(config.get("global_head_dim"), int):
        config["global_head_dim"] = 2 * dim
    if "qk_rope_head_dim" in config:
        nope, rope = config.get("qk_nope_head_dim"), config["qk_rope_head_dim"]
        config |= {k: v for k, v in {"head_dim": rope}.items() if k in config}
        if "qk_head_dim" in config and nope:
            config["qk_head_dim"] = nope + rope
        dim = rope
    hidden = next((config[name] for name in _HIDDEN if isinstance(config.get(name), int)), None)
    for name in (*_HIDDEN, *_AS_HIDDEN):
        if config.get(name) == hidden and hidden is not None:
            config[name] = few * _head_dim(config)
    if isinstance(config.get("rotary_dim"), int):
        config["rotary_dim"] = dim // 2
    _shrink_ropes(config, int(dim * _partial(config)) // 2)


def _partial(config: dict[str, Any]) -> float:
    inner = config.get("rope_parameters") or {}
    found = inner.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return found or config.get("rotary_pct") or 1.0


def _head_dim(config: dict[str, Any]) -> int:
    """The least width of which an even number of values is rotated."""
    return next(d for d in range(24, 200, 4) if int(d * _partial(config)) % 2 == 0)


def _shrink_ropes(config: dict[str, Any], frequencies: int) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if not isinstance(rope, dict):
            continue
        for key in ("short_factor", "long_factor"):
            if key in rope:
                rope[key] = rope[key][:frequencies]
        if "mrope_section" in rope:
            third = frequencies // 3
            rope["mrope_section"] = [frequencies - 2 * third, third, third]


def _shrink_blocks(config: dict[str, Any]) -> None:
    """Of keys that are chosen (MiniMax-M3), after layers and heads."""
    chosen = config.get("sparse_attention_config")
    if not isinstance(chosen, dict):
        return
    for key in ("sparse_attention_freq", "sparse_disable_index_value"):
        chosen[key] = chosen[key][: config["num_hidden_layers"]]
    small = {"sparse_num_index_heads": config["num_key_value_heads"], "sparse_block_size": 4}
    chosen |= {**small, "sparse_topk_blocks": 2, "sparse_index_dim": config["head_dim"]}


def _shrink_experts(config: dict[str, Any]) -> None:
    for name in _EXPERTS:
        if isinstance(config.get(name), int) and config[name]:
            config[name] = min(config[name], 8)
    for name in _TOP_K:
        if isinstance(config.get(name), int):
            config[name] = min(config[name], 2)
    if isinstance(config.get("n_group"), int) and config["n_group"] > 1:
        config |= {"n_group": 2, "topk_group": 1}
