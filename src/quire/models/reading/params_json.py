"""Mistral's own `params.json` as the config.json of the same model.

Read as strictly: every key is translated, known to say nothing about the answers, or an error.
Free of torch.
"""

from __future__ import annotations

from typing import Any

from quire.errors import UnknownConfigKey
from quire.models.config_reader import unsupported

PARAMS = "params.json"
_RENAMED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}
_LENGTHS = ("max_position_embeddings", "max_seq_len")
_DEFAULT_LENGTH = 128_000
"""Length that other engines take for files without one."""
_MOST_LAYERS = 10_000
"""Most layers of a model, since a list is made here with an entry for each."""
_OFF = {
    "quantization": "full-precision weights; use the repository's Hugging Face files",
    "yarn": "no YaRN; use the repository's Hugging Face files",
    "llama_4_scaling": "no scaled queries; use the repository's Hugging Face files",
    "vision_encoder": "text models; use the repository's Hugging Face files",
    "multimodal": "text models; use the repository's Hugging Face files",
    "use_biases": "no biases",
    "q_lora_rank": "no latent attention; use the repository's Hugging Face files",
    "kv_lora_rank": "no latent attention; use the repository's Hugging Face files",
}
_IRRELEVANT = frozenset(["causal", "max_batch_size", "torch_dtype", "dtype", "use_cache"])
_MOE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}


def config_of_params(params: dict[str, Any]) -> dict[str, Any]:
    """The config.json that describes the same model. Raises UnknownConfigKey, or
    UnsupportedConfigValue for a value that is not implemented.
    """
    left = {key: value for key, value in params.items() if key not in _IRRELEVANT}
    for key, allowed in _OFF.items():
        if value := left.pop(key, None):
            raise unsupported(key, value, allowed, PARAMS)
    config: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    config |= {name: left.pop(key) for key, name in _RENAMED.items() if key in left}
    lengths = [value for key in _LENGTHS if (value := left.pop(key, None)) is not None]
    config["max_position_embeddings"] = lengths[0] if lengths else _DEFAULT_LENGTH
    _set_window(config, left)
    _set_experts(config, left)
    if left:
        raise UnknownConfigKey(f"{PARAMS}: the keys {sorted(left)} are not known here.")
    return config


def _set_window(config: dict[str, Any], left: dict[str, Any]) -> None:
    window = left.pop("sliding_window", None)
    config["sliding_window"] = window
    if not isinstance(window, list):
        return
    sizes = {size for size in window if size is not None}
    layers = config.get("num_hidden_layers")
    num_layers = layers if isinstance(layers, int) and layers <= _MOST_LAYERS else 0
    if len(sizes) > 1 or num_layers < 1 or not window or num_layers % len(window):
        raise unsupported(
            "sliding_window", window, "one size in a pattern that divides n_layers", PARAMS
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    config["layer_types"] = kinds * (num_layers // len(window))
    config["sliding_window"] = next(iter(sizes), None)
    # transformers' Mistral has one window for all layers, Ministral has types of layers
    config |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}


def _set_experts(config: dict[str, Any], left: dict[str, Any]) -> None:
    experts = left.pop("moe", None)
    if experts is None:
        return
    if not isinstance(experts, dict) or set(experts) != set(_MOE):
        raise unsupported("moe", experts, f"{' and '.join(_MOE)}", PARAMS)
    if "layer_types" in config:
        raise unsupported("moe", experts, "null next to windows in some layers", PARAMS)
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {_MOE[key]: value for key, value in experts.items()}
