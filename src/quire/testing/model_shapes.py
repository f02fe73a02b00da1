"""The named model shapes, and the config.json that each family writes for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder and the family it is known from."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tie: bool
    theta: float
    context: int = 8192
    experts: int = 4  # in families that have experts
    experts_per_token: int = 2
    expert_ffn: int | None = None  # default half of ffn where a family's config says it


SHAPES = {
    "tiny": ModelShape("llama", 4, 128, 4, 2, 32, 384, 1024, True, 1e4),
    # a tenth of 0.6b with the same vocabulary, as models that draft have
    "0.06b": ModelShape("qwen3", 20, 256, 4, 2, 64, 1024, 151_936, True, 1e6),
    # Qwen3-0.6B and Qwen3-4B
    "0.6b": ModelShape("qwen3", 28, 1024, 16, 8, 128, 3072, 151_936, True, 1e6, 40_960),
    "4b": ModelShape("qwen3", 36, 2560, 32, 8, 128, 9728, 151_936, True, 1e6, 40_960),
    # 32 small experts a layer, four of them active: 0.6 B of 2.1 B parameters
    "2b-experts": ModelShape(
        "qwen3_moe", 24, 1024, 16, 8, 128, 3072, 151_936, True, 1e6, 40_960, 32, 4, 768
    ),
    "1b": ModelShape("llama", 16, 2048, 32, 8, 64, 8192, 128_256, True, 5e5),  # Llama-3.2-1B
    # 12 of the 32 layers of Youtu-LLM-2B
    "0.9b-latent": ModelShape("youtu", 12, 2048, 16, 16, 128, 6144, 128_256, True, 1.6e6),
    # Mamba-2-780M, whose channels are twice the width; and Qwen3.5-0.8B
    "0.8b-mamba2": ModelShape("mamba2", 48, 1536, 48, 48, 64, 3072, 50_288, True, 1e4),
    "0.8b-delta": ModelShape("qwen3_5", 24, 1024, 8, 2, 256, 3584, 248_320, True, 1e7),
    "8b": ModelShape("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, False, 5e5),  # Llama-3.1-8B
}


def make_config(shape: str | Mapping[str, Any], family: str) -> dict[str, Any]:
    """The config.json of a shape in a family; a mapping gives keys that differ from tiny's."""
    if isinstance(shape, str):
        return _CONFIGS[family](SHAPES[shape])
    config = _CONFIGS[family](SHAPES["tiny"])
    return config | dict(shape)


def _llama(
    s: ModelShape, architecture: str = "LlamaForCausalLM", kind: str = "llama"
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": s.vocab,
        "hidden_size": s.width,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": s.theta,
        "tie_word_embeddings": s.tie,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _like_llama(
    architecture: str, kind: str, **keys: Any
) -> Callable[[ModelShape], dict[str, Any]]:
    return lambda s: _llama(s, architecture, kind) | keys


def _gemma(architecture: str, kind: str, **keys: Any) -> Callable[[ModelShape], dict[str, Any]]:
    def config(s: ModelShape) -> dict[str, Any]:
        base = _llama(s, architecture, kind) | {"hidden_act": "gelu_pytorch_tanh"}
        if kind == "gemma":
            return base
        scalar = {"query_pre_attn_scalar": s.head_dim, "sliding_window": 1024}
        return base | {"hidden_activation": base.pop("hidden_act")} | scalar | keys

    return config


def _granite(s: ModelShape) -> dict[str, Any]:
    scales = {"attention_multiplier": s.head_dim**-0.5, "embedding_multiplier": 12.0}
    scales |= {"residual_multiplier": 0.25, "logits_scaling": 4.0}
    return _llama(_square(s), "GraniteForCausalLM", "granite") | scales


def _starcoder2(s: ModelShape) -> dict[str, Any]:
    config = _llama(_square(s), "Starcoder2ForCausalLM", "starcoder2")
    del config["rms_norm_eps"]
    return config | {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}


def _mamba2(s: ModelShape) -> dict[str, Any]:
    llama = _llama(s, "Mamba2ForCausalLM", "mamba2")
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    keys: dict[str, Any] = {"num_heads": s.heads, "head_dim": s.head_dim}
    keys |= {"expand": s.heads * s.head_dim // s.width}
    keys |= {"n_groups": 1, "state_size": 128, "conv_kernel": 4, "layer_norm_epsilon": 1e-5}
    keys |= {"tie_word_embeddings": s.tie}
    return {key: llama[key] for key in kept} | keys


def _delta(s: ModelShape) -> dict[str, Any]:
    """Gated delta nets, with twice the heads that attention has, of half their length."""
    heads, dim = 2 * s.heads, s.head_dim // 2
    keys = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    keys |= {"linear_key_head_dim": dim, "linear_value_head_dim": dim, "linear_conv_kernel_dim": 4}
    return _llama(s, "Qwen3_5ForCausalLM", "qwen3_5_text") | keys


def _gpt2(s: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": s.vocab,
        "n_embd": s.width,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_inner": s.ffn,
        "n_positions": s.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": s.tie,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _experts(
    architecture: str, kind: str, count_key: str
) -> Callable[[ModelShape], dict[str, Any]]:
    def config(s: ModelShape) -> dict[str, Any]:
        keys: dict[str, Any] = {count_key: s.experts, "num_experts_per_tok": s.experts_per_token}
        if kind == "qwen3_moe":
            width = s.expert_ffn or s.ffn // 2
            keys |= {"moe_intermediate_size": width, "norm_topk_prob": True}
        return _llama(s, architecture, kind) | keys

    return config


def _gpt_oss(s: ModelShape) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    keys = {"rope_scaling": scaling, "sliding_window": 128, "swiglu_limit": 7.0}
    return _experts("GptOssForCausalLM", "gpt_oss", "num_local_experts")(s) | keys


def _latent(architecture: str, kind: str, **keys: Any) -> Callable[[ModelShape], dict[str, Any]]:
    """Latent attention, whose heads have half as many rotated values again."""

    def config(s: ModelShape) -> dict[str, Any]:
        base = _llama(s, architecture, kind) | {"num_key_value_heads": s.heads}
        del base["head_dim"]
        sizes = {"q_lora_rank": s.width * 3 // 4, "kv_lora_rank": 4 * s.head_dim}
        sizes |= {"qk_nope_head_dim": s.head_dim, "qk_rope_head_dim": s.head_dim // 2}
        return base | sizes | {"v_head_dim": s.head_dim} | keys

    return config


def _square(s: ModelShape) -> ModelShape:
    """Heads as wide together as the hidden state, for families without a `head_dim` key."""
    return replace(s, head_dim=s.width // s.heads)


_CONFIGS: dict[str, Callable[[ModelShape], dict[str, Any]]] = {
    "gemma": _gemma("GemmaForCausalLM", "gemma"),
    "gemma2": _gemma(
        "Gemma2ForCausalLM", "gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    ),
    "gemma3": _gemma("Gemma3ForCausalLM", "gemma3_text", rope_local_base_freq=1e4),
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "mamba2": _mamba2,
    "minicpm3": _latent("MiniCPM3ForCausalLM", "minicpm3", dim_model_base=64, scale_depth=1.4),
    "mistral": _like_llama("MistralForCausalLM", "mistral", sliding_window=4096),
    "mixtral": _experts("MixtralForCausalLM", "mixtral", "num_local_experts"),
    "olmo2": _like_llama("Olmo2ForCausalLM", "olmo2"),
    "phi3": _like_llama("Phi3ForCausalLM", "phi3", sliding_window=None),
    "qwen2": _like_llama("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _like_llama("Qwen3ForCausalLM", "qwen3"),
    "qwen3_5": _delta,
    "qwen3_moe": _experts("Qwen3MoeForCausalLM", "qwen3_moe", "num_experts"),
    "starcoder2": _starcoder2,
    "youtu": _latent("YoutuForCausalLM", "youtu", pad_token_id=None),
}
FAMILIES = tuple(sorted(_CONFIGS))
"""The families that have these shapes."""
