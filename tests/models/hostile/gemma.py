"""Hostile models of Gemma 3n and Gemma 4."""

from __future__ import annotations

from tests.models.hostile.form import Hostile

ROPES = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.4,
            "rope_theta": 5e2,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
SHARING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 4,
    "num_kv_shared_layers": 1,
    "final_logit_softcapping": 1.5,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
}
LONGER = {
    "num_hidden_layers": 7,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention"),
        *("full_attention", "sliding_attention", "full_attention"),
    ],
    "num_kv_shared_layers": 2,
}
"""A layer before the last of its type is none that others share."""
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}

GEMMA = {
    "gemma4": Hostile(
        "gemma4_text",
        {
            **SHARING,
            **ROPES,
            **EXPERTS,
            "vocab_size_per_layer_input": 96,
            "attention_k_eq_v": True,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "use_bidirectional_attention": "vision",
        },
        part_of="Gemma4ForConditionalGeneration",
        is_default=True,
    ),
    "gemma4-dense": Hostile(
        "gemma4_text",
        {
            **SHARING,
            **ROPES,
            **LONGER,
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4_unified": Hostile(
        "gemma4_unified_text",
        {
            **{k: v for k, v in SHARING.items() if not k.endswith("per_layer_input")},
            **ROPES,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
        },
        part_of="Gemma4UnifiedForConditionalGeneration",
    ),
    "gemma3n": Hostile(
        "gemma3n_text",
        {
            **SHARING,
            "intermediate_size": [80, 72, 64],
            "activation_sparsity_pattern": [0.7, 0.0, 0.0],
            "laurel_rank": 5,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        is_default=True,
    ),
    "gemma3n-plain": Hostile(
        "gemma3n_text",
        {
            **SHARING,
            **LONGER,
            "attention_bias": True,
            "activation_sparsity_pattern": [0.0] * 7,
            "laurel_rank": 5,
            "final_logit_softcapping": 2.0,
        },
        part_of="Gemma3nForConditionalGeneration",
    ),
}
