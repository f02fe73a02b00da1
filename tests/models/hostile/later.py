"""Hostile models of families that came later."""

from __future__ import annotations

from typing import Any

from tests.models.hostile.dense import GPT, LAYER, SQUARE
from tests.models.hostile.form import LLAMA3, TYPES, WINDOWS, YARN, Hostile, rope
from tests.models.hostile.latent import V3
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

COHERE2_MOE = {
    "rms_norm_eps": None,
    "layer_norm_eps": 0.05,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_shared_experts": 2,
    "sliding_window": 4,
    "logit_scale": 0.4,
    "attention_bias": True,
    "prefix_dense_intermediate_size": 72,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_theta": 1e3,
}

LATER = {
    "codegen": Hostile(
        "codegen", {**GPT, "rotary_dim": 8}, base={}, length_key="n_positions", is_default=True
    ),
    "gpt_neox_japanese": Hostile(
        "gpt_neox_japanese",
        {
            **LAYER,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "intermediate_multiple_size": 2,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            **rope("default", partial_rotary_factor=0.5),
        },
        attention="eager",
    ),
    "flint": Hostile(
        "flint",
        {
            **QWEN,
            **WINDOWS,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "cohere2_moe": Hostile(
        "cohere2_moe",
        {
            **COHERE2_MOE,
            "expert_selection_fn": "sigmoid",
            "layer_types": ["full_attention", *TYPES],
            "tie_word_embeddings": True,
        },
    ),
    "cohere2_moe-rms": Hostile(
        "cohere2_moe",
        {
            **COHERE2_MOE,
            "rms_norm_eps": 0.05,
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 2,
        },
    ),
    "aria": Hostile(
        "aria_text", {"moe_num_experts": 4, "moe_topk": 2, "attention_bias": True}, is_default=True
    ),
    "apertus1p5": Hostile("apertus1p5_text", {"head_dim": None, "attention_bias": True, **LLAMA3}),
    "mistral4": Hostile(
        "mistral4",
        {
            **V3,
            "n_routed_experts": 12,
            **rope(
                "yarn",
                **YARN,
                mscale=1.0,
                mscale_all_dim=0.7,
                llama_4_scaling_beta=0.6,
                truncate=False,
            ),
        },
        architecture="Mistral4ForCausalLM",
        is_default=True,
    ),
    "stablelm-heads": Hostile(
        "stablelm",
        {**LAYER, "qk_layernorm": True, **rope("default", partial_rotary_factor=0.25)},
        is_default=True,
    ),
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
