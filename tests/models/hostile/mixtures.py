"""Tiny random mixtures of experts with values that hide nothing: see form.py."""

from __future__ import annotations

from typing import Any

from tests.models.hostile.form import WINDOWS, Hostile, rope
from tests.models.hostile.references import step3p5

QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
GRANITE = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DBRX: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 64,
    "vocab_size": 96,
    "attn_config": {"clip_qkv": 0.9, "kv_n_heads": 2, "rope_theta": 1e3},
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        "ffn_hidden_size": 48,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_normalize_expert_weights": 1.0,
    },
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
}

MIXTURES = {
    "qwen2_moe": Hostile(
        "qwen2_moe",
        {
            **QWEN,
            **WINDOWS,
            "head_dim": None,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
        },
        is_default=True,
    ),
    "olmoe": Hostile(
        "olmoe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    ),
    "flex_olmo": Hostile("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": Hostile(
        "glm4_moe",
        {**DEEPSEEK, "attention_bias": True, "use_qk_norm": True, **rope("default")},
    ),
    "solar_open": Hostile(
        "solar_open", {**DEEPSEEK, "first_k_dense_replace": None, "intermediate_size": None}
    ),
    "dots1": Hostile("dots1", {**DEEPSEEK, **WINDOWS, "attention_bias": True}),
    "exaone_moe": Hostile(
        "exaone_moe",
        {
            **DEEPSEEK,
            **WINDOWS,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts": 8,
            "num_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "minimax_m2": Hostile(
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "ernie4_5_moe": Hostile(
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_norm_min": 0.6,
            "use_bias": True,
        },
        is_default=True,
    ),
    "hunyuan_moe": Hostile(
        "hunyuan_v1_moe",
        {
            "num_experts": 4,
            "moe_topk": 2,
            "attention_bias": True,
            **rope("dynamic", alpha=50.0, factor=1.0),
        },
    ),
    "hy_v3": Hostile(
        "hy_v3",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 40,
            "router_scaling_factor": 1.6,
            "attention_bias": True,
        },
    ),
    "phimoe": Hostile(
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.4,
            "head_dim": None,
            "attention_bias": True,
            "lm_head_bias": True,
            **rope("longrope", **LONG, original_max_position_embeddings=96),
        },
        is_default=True,
    ),
    "granite_moe": Hostile("granitemoe", GRANITE, is_default=True),
    "granite_moe_shared": Hostile("granitemoeshared", {**GRANITE, "shared_intermediate_size": 56}),
    "dbrx": Hostile("dbrx", DBRX, base={}, length_key="max_seq_len", is_default=True),
    "mimo": Hostile(
        "qwen2",
        {"head_dim": None, "attention_bias": True, "num_nextn_predict_layers": 1},
        architecture="MiMoForCausalLM",
    ),
    "llama4": Hostile(
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": [
                *("chunked_attention", "full_attention", "full_attention", "chunked_attention"),
            ],
            "attention_chunk_size": 8,
            "attn_scale": 0.7,
            "floor_scale": 6,
            "attention_bias": True,
        },
        is_default=True,
    ),
    "step3p5": Hostile(
        "step3p5",
        {
            "num_key_value_heads": None,
            "num_attention_groups": 2,
            "layer_types": [
                *("full_attention", "sliding_attention", "full_attention", "sliding_attention")
            ],
            "num_nextn_predict_layers": 1,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 6,
                "num_attention_groups": 2,
                "head_dim": 24,
                "true_head_dim": 24,
            },
            "sliding_window": 4,
            "attention_bias": True,
            "rope_theta": [5e2, 1e2, 5e2, 1e2],
            "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "yarn_only_types": ["full_attention"],
            "use_head_wise_attn_gate": True,
            "moe_layers_enum": "1,2",
            "moe_num_experts": 5,
            "moe_top_k": 2,
            "moe_intermediate_size": 40,
            "share_expert_dim": 48,
            "moe_router_scaling_factor": 1.7,
            "moe_router_activation": "sigmoid",
            "norm_expert_weight": True,
            "use_moe_router_bias": True,
            "need_fp32_gate": True,
            "swiglu_limits": [0.0, 0.0, 0.4, 0.0],
            "swiglu_limits_shared": [0.5, 0.0, 0.3, 0.0],
        },
        architecture="Step3p5ForCausalLM",
        reference=step3p5,
        is_default=True,
    ),
    "mimo_v2": Hostile(
        "mimo_v2_flash",
        {
            **WINDOWS,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 5e2,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        is_default=True,
    ),
}
