"""Hostile models with recurrent states."""

from __future__ import annotations

from tests.models.hostile.form import Hostile, rope
from tests.models.hostile.latent import V3

MAMBA = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "layer_norm_epsilon": 0.05,
    "max_position_embeddings": 64,
}

MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    "time_step_limit": (0.4, 1.1),
}
"""Of hybrid models."""

DELTA = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **rope("default", partial_rotary_factor=0.5),
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

NEMOTRON_H = {
    "num_hidden_layers": None,
    "rms_norm_eps": None,
    "layer_norm_epsilon": 0.05,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "conv_kernel": 3,
    "time_step_min": 0.3,
}
EXPERTS_OF_NEMOTRON_H = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.7,
}
ZAMBA2 = {
    "head_dim": None,
    "adapter_rank": 8,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_expand": 1,
    "n_mamba_heads": 8,
    "time_step_min": 0.3,
    "tie_word_embeddings": True,  # without it transformers shares nothing
}

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
KDA = {
    **{k: v for k, v in V3.items() if k not in ("n_routed_experts", "first_k_dense_replace")},
    "num_local_experts": 12,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": LAYERS,
    "pad_token_id": 0,
}

STATE = {
    "kimi_linear": Hostile(
        "kimi_linear",
        {
            **KDA,
            "linear_head_dim": 10,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": None,
        },
        is_default=True,
    ),
    "bailing_hybrid": Hostile(
        "bailing_hybrid",
        {
            **KDA,
            "head_dim": 6,
            "short_conv_kernel_size": 3,
            "kda_lower_bound": -0.7,
            **rope("default"),
        },
        is_default=True,
    ),
    "bailing_hybrid-unbounded": Hostile(
        "bailing_hybrid",
        {
            **KDA,
            "head_dim": 6,
            "layer_types": None,
            "layer_group_size": 2,
            "kda_safe_gate": False,
            "q_lora_rank": None,
            **rope("default"),
        },
    ),
    "olmo_hybrid": Hostile(
        "olmo_hybrid",
        {
            "head_dim": None,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,  # transformers stores equal parts of the convolution
            "linear_conv_kernel_dim": 3,
            "layer_types": LAYERS,
            "attention_bias": True,
            **rope("default"),
        },
        is_default=True,
    ),
    "olmo_hybrid-nope": Hostile(
        "olmo_hybrid",
        {
            "head_dim": None,
            "linear_allow_neg_eigval": False,
            "linear_value_head_dim": 12,
            "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "minimax": Hostile(
        "minimax",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": LAYERS,
            "block_size": 8,
            **{f"{part}_alpha_factor": 1.7 for part in ("mlp", "full_attn", "linear_attn")},
            **{f"{part}_beta_factor": 0.6 for part in ("mlp", "full_attn", "linear_attn")},
        },
        is_default=True,
    ),
    "recurrent_gemma": Hostile(
        "recurrent_gemma",
        {
            "head_dim": None,
            "num_key_value_heads": 1,
            "lru_width": 48,
            "attention_window_size": 4,
            "conv1d_width": 3,
            "logits_soft_cap": 1.5,
            "block_types": ["recurrent", "attention"],
            "attention_bias": True,
            **rope("default", partial_rotary_factor=0.5),
        },
        is_default=True,
    ),
    "mamba": Hostile(
        "mamba",
        {
            "state_size": 5,
            "time_step_rank": 7,
            "conv_kernel": 3,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        base=MAMBA,
        lacks_embeddings=True,
        is_default=True,
    ),
    "falcon_mamba": Hostile(
        "falcon_mamba",
        {
            "state_size": 5,
            "time_step_rank": 7,
            "mixer_rms_eps": 0.05,
            "use_conv_bias": False,
        },
        base=MAMBA,
        lacks_embeddings=True,
    ),
    "mamba2": Hostile(
        "mamba2",
        {
            "state_size": 6,
            "num_heads": 8,
            "head_dim": 12,
            "n_groups": 4,
            "conv_kernel": 3,
            "use_bias": True,
            "time_step_limit": (0.4, 1.1),
            "chunk_size": 8,
        },
        base=MAMBA,
        lacks_embeddings=True,
    ),
    "qwen3_next": Hostile(
        "qwen3_next",
        {**DELTA, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [2]},
    ),
    "qwen3_5_moe": Hostile("qwen3_5_moe_text", {**DELTA, **EXPERTS, "intermediate_size": None}),
    "qwen3_5": Hostile("qwen3_5_text", DELTA, is_default=True),
    "granite_hybrid": Hostile(
        "granitemoehybrid",
        {
            **MAMBA2,
            "head_dim": None,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_expand": 1,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "granite_hybrid-experts": Hostile(
        "granitemoehybrid",
        {
            **MAMBA2,
            "head_dim": None,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 56,
            "mamba_expand": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "jamba": Hostile(
        "jamba",
        {
            "head_dim": None,
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 7,
            "mamba_proj_bias": False,
            "mamba_conv_bias": False,
        },
        is_default=True,
    ),
    "falcon_h1": Hostile(
        "falcon_h1",
        {
            **MAMBA2,
            "head_dim": None,
            "mamba_d_ssm": 48,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [0.6, 1.7],
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.3,
            "ssm_multipliers": [0.5, 1.4, 0.7, 1.2, 0.9],
            "ssm_in_multiplier": 1.6,
            "ssm_out_multiplier": 0.55,
        },
    ),
    "falcon_h1-gate": Hostile(
        "falcon_h1",
        {**MAMBA2, "head_dim": None, "mamba_d_ssm": 48, "mamba_n_heads": 4},
        is_default=True,
    ),
    "nemotron_h": Hostile(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "nemotron_h-experts": Hostile(
        "nemotron_h",
        {
            **NEMOTRON_H,
            **EXPERTS_OF_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "use_bias": True,
            "mamba_proj_bias": True,
            "n_group": 4,
            "topk_group": 2,
        },
        is_default=True,
    ),
    "nemotron_h-narrow": Hostile(
        "nemotron_h",
        {
            **NEMOTRON_H,
            **EXPERTS_OF_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "moe_latent_size": 28,
        },
        is_default=True,
    ),
    "zamba2": Hostile(
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_key_value_heads": None,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "add_bias_linear": True,
        },
        is_default=True,
    ),
    "zamba2-groups": Hostile(
        "zamba2",
        {
            **ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_key_value_heads": None,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "add_bias_linear": True,
            "mamba_ngroups": 2,
        },
    ),
    "zamba2-several": Hostile(
        "zamba2",
        {
            **ZAMBA2,
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
        },
    ),
    "lfm2": Hostile(
        "lfm2",
        {
            "head_dim": None,
            "norm_eps": 0.05,
            "rms_norm_eps": None,
            "conv_bias": True,
            "conv_L_cache": 3,
            "intermediate_size": 100,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "lfm2_moe": Hostile(
        "lfm2_moe",
        {
            "head_dim": None,
            "norm_eps": 0.05,
            "rms_norm_eps": None,
            "conv_bias": True,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        is_default=True,
    ),
}
