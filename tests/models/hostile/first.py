"""The first fifteen families."""

from tests.models.hostile.form import EXPERTS, LLAMA3, LONG, WINDOWS, YARN, Hostile, rope

FIRST = {
    "llama": Hostile("llama", {"attention_bias": True, "mlp_bias": True}, is_default=True),
    "llama-llama3": Hostile("llama", LLAMA3),
    "llama-linear": Hostile("llama", rope("linear", factor=3.0)),
    "llama-yarn": Hostile("llama", rope("yarn", **YARN, truncate=False)),
    "llama-yarn-mscale": Hostile("llama", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.9)),
    "llama-dynamic": Hostile("llama", rope("dynamic", factor=4.0), is_default=True),
    "mistral": Hostile("mistral", {"sliding_window": 4}),
    "qwen2": Hostile("qwen2", {"use_sliding_window": True, **WINDOWS, "head_dim": None}),
    "qwen3": Hostile(
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        is_default=True,
    ),
    "gemma": Hostile("gemma", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": Hostile(
        "gemma2",
        {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "sliding_window": 4,
        },
        is_default=True,
    ),
    "gemma3": Hostile(
        "gemma3_text",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 10,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        is_default=True,
    ),
    "phi3": Hostile(
        "phi3",
        {
            "head_dim": None,
            "sliding_window": 4,
            **rope("longrope", **LONG),
            "original_max_position_embeddings": 48,
        },
        max_model_len=48,
    ),
    "phi3-long": Hostile(
        "phi3",
        {
            "head_dim": None,
            **rope("longrope", **LONG),
            "original_max_position_embeddings": 8,
        },
    ),
    "olmo2": Hostile("olmo2", {"attention_bias": True}, is_default=True),
    "gpt2": Hostile(
        "gpt2",
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 80,
            "n_positions": 64,
            "layer_norm_epsilon": 0.05,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        base={},
        length_key="n_positions",
        is_default=True,
    ),
    "granite": Hostile(
        "granite",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": Hostile(
        "starcoder2", {"sliding_window": 4, "norm_epsilon": 0.05, "rms_norm_eps": None}
    ),
    "mixtral": Hostile("mixtral", {**EXPERTS, "sliding_window": 4}),
    "qwen3_moe": Hostile(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe-renorm": Hostile(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 4,
        },
        seed=1,
    ),
    "gpt_oss": Hostile(
        "gpt_oss",
        {
            **EXPERTS,
            **WINDOWS,
            "swiglu_limit": 0.4,
            **rope("yarn", **YARN, truncate=True),
        },
        is_default=True,
    ),
}
