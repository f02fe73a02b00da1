"""Configs of the text parts of Gemma 3n and Gemma 4 as published, and how many parameters
transformers counts in such models, factors of layers included.
"""

from typing import Any

SLIDING = ["sliding_attention"]
PUBLISHED_GEMMA: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-3n-E4B": (
        {
            "architectures": ["Gemma3nForCausalLM"],
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 4,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2048,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": [16384] * 35,
            "laurel_rank": 64,
            "layer_types": (SLIDING * 4 + ["full_attention"]) * 7,
            "max_position_embeddings": 32768,
            "num_attention_heads": 8,
            "num_hidden_layers": 35,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 15,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
        },
        6_835_235_568,
    ),
    "gemma-4-26B-A4B": (
        {
            "architectures": ["Gemma4ForCausalLM"],
            "attention_bias": False,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "layer_types": (SLIDING * 5 + ["full_attention"]) * 5,
            "max_position_embeddings": 262144,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "top_k_experts": 8,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
        },
        25_233_141_790,
    ),
}
HARMLESS_IN_GEMMA = ("altup_coef_clip", "query_pre_attn_scalar")
