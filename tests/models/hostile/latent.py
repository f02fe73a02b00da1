"""Tiny random models with latent attention, with values that hide nothing: see form.py."""

from __future__ import annotations

from tests.models.hostile.form import YARN, Hostile, rope

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
}
YOUTU = {**LATENT, "pad_token_id": None}  # whose embedding transformers replaces by zeros
EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
V3 = {**LATENT, **EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
SCALED = rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.9, truncate=False)
INDEXED = {
    **V3,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "first_k_dense_replace": None,
    "index_topk": 5,
    "index_n_heads": 24,
    "index_head_dim": 26,
}
"""Fewer tokens are chosen than the prompts have; with so many heads no two scores are equal."""

LATENTS = {
    "deepseek_v32": Hostile("deepseek_v32", {**INDEXED, **SCALED}),
    "glm_moe_dsa": Hostile(
        "glm_moe_dsa",
        {
            **INDEXED,
            "num_hidden_layers": 4,
            "mlp_layer_types": None,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        is_default=True,
    ),
    "mistral_large4": Hostile(
        "mistral_large4_text",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 7,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense", "dense", "dense"],
            "no_rope_layers": [1, 0, 1, 0, 1, 1, 0],
            "kv_source_layers": [0, 1, 0, 1, 4, 4, 1],
            "indexer_types": ["full", "full", "shared", "full", "full", "full", "shared"],
            "index_topk": 5,
            "index_n_heads": 24,
            "index_head_dim": 26,
            "final_logit_softcapping": 1.5,
            **SCALED,
        },
        architecture="MistralLarge4ForCausalLM",
        whole="MistralLarge4ForConditionalGeneration",
        is_default=True,
    ),
    "minimax_m3": Hostile(
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 4,
            "dense_intermediate_size": 72,
            "shared_intermediate_size": 56,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.7,
            "swiglu_limit": 0.3,
            "rotary_dim": 12,
            **rope("default", partial_rotary_factor=0.5),
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 22,
            "index_block_size": 3,
            "index_topk_blocks": 4,
            "index_local_blocks": 2,
        },
        architecture="MiniMaxM3VLForCausalLM",
        is_default=True,
    ),
    "deepseek_v4": Hostile(
        "deepseek_v4",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "intermediate_size": None,
            "q_lora_rank": 28,
            "partial_rotary_factor": 8 / 24,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.7,
            "swiglu_limit": 0.3,
            "o_groups": 2,
            "o_lora_rank": 12,
            "index_n_heads": 24,
            "index_head_dim": 22,
            "index_topk": 3,
            "sliding_window": 5,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 0.02,
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 2,
                "heavily_compressed_attention": 4,
            },
            "compress_rope_theta": 8.0,
            **rope("yarn", **{**YARN, "beta_slow": 0.25}),
        },
        is_default=True,
    ),
    "minicpm3": Hostile(
        "minicpm3", {**LATENT, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 40}
    ),
    "youtu": Hostile("youtu", {**YOUTU, "attention_bias": True}),
    "youtu-halves-yarn": Hostile(
        "youtu",
        {**YOUTU, "rope_interleave": False, **SCALED},
        nulls=("q_lora_rank",),
        is_default=True,
    ),
    "deepseek_v2": Hostile(
        "deepseek_v2",
        {**LATENT, **EXPERTS, "topk_method": "greedy", "first_k_dense_replace": 1, **SCALED},
        nulls=("q_lora_rank",),
    ),
    "deepseek_v2-groups": Hostile(
        "deepseek_v2",
        {
            **LATENT,
            **EXPERTS,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        is_default=True,
    ),
    "deepseek_v3": Hostile("deepseek_v3", {**V3, **SCALED}, is_default=True),
    "deepseek_v3-one_group": Hostile(
        "deepseek_v3",
        {**V3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
    "axk1": Hostile(
        "axk1",
        {**V3, "first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        is_default=True,
    ),
    "glm4_moe_lite": Hostile(
        "glm4_moe_lite",
        {
            **V3,
            "first_k_dense_replace": None,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
}
