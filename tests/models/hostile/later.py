"""Hostile models of families that came later."""

from __future__ import annotations

from typing import Any

from tests.models.hostile.dense import GPT, SQUARE
from tests.models.hostile.form import TYPES, WINDOWS, YARN, Hostile, rope
from tests.models.hostile.mixtures import GRANITE, QWEN
from tests.models.hostile.state import MAMBA2

ROPES: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
}
GPT_NEO = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "window_size": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LATER = {
    "ministral3": Hostile(
        "ministral3",
        {
            "sliding_window": 12,
            **rope(
                "yarn",
                **YARN,
                mscale=1.0,
                mscale_all_dim=0.7,
                llama_4_scaling_beta=0.6,
            ),
        },
        is_default=True,
    ),
    "emu3": Hostile("llama", rope("default"), architecture="Emu3ForCausalLM"),
    "gpt_neo": Hostile("gpt_neo", GPT_NEO, base={}),
    "openai_gpt": Hostile(
        "openai-gpt",
        {k: v for k, v in GPT.items() if k != "n_inner"},
        base={},
        length_key="n_positions",
        is_default=True,
    ),
    "biogpt": Hostile(
        "biogpt",
        {**SQUARE, "rms_norm_eps": None, "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    "bamba": Hostile(
        "bamba",
        {
            **MAMBA2,
            "head_dim": None,
            "mamba_expand": 1,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "attn_layer_indices": [1],
        },
    ),
    "lfm3": Hostile(
        "lfm3",
        {
            "rms_norm_eps": None,
            "norm_eps": 0.05,
            "conv_L_cache": 3,
            "attention_bias": True,
            "sliding_window": 4,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e3,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        is_default=True,
    ),
    "lfm3-plain": Hostile(
        "lfm3",
        {
            "rms_norm_eps": None,
            "norm_eps": 0.05,
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "sliding_window": 4,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "mellum": Hostile(
        "mellum",
        {
            **QWEN,
            **WINDOWS,
            **ROPES,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "granite_moe_swa": Hostile(
        "granitemoe_swa",
        {
            **GRANITE,
            **WINDOWS,
            "shared_intermediate_size": 56,
            "layer_rope_theta": [1e3, 0.0, 50.0],
        },
    ),
    "afmoe": Hostile(
        "afmoe",
        {
            **QWEN,
            "sliding_window": 4,
            "layer_types": TYPES,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
            "route_scale": 1.7,
            "mup_enabled": True,
            "attention_bias": True,
        },
    ),
}
