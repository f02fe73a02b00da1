"""Dense families beyond the first fifteen."""

from tests.models.hostile.form import LLAMA3, WINDOWS, YARN, Hostile, rope
from tests.models.hostile.references import chatglm, exaone, internlm2, minicpm

SQUARE = {"head_dim": None}  # heads share the width
LAYER = {**SQUARE, "rms_norm_eps": None, "layer_norm_eps": 0.05}
PARTIAL = rope("default", partial_rotary_factor=0.5)
GPT = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 80,
    "n_positions": 64,
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOOM = {
    "vocab_size": 96,
    "hidden_size": 96,
    "n_layer": 3,
    "n_head": 6,
    "seq_length": 64,
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "layer_norm_epsilon": 0.05,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MPT = {
    "vocab_size": 96,
    "d_model": 96,
    "n_layers": 3,
    "n_heads": 6,
    "max_seq_len": 64,
    "layer_norm_epsilon": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.4},
}
CHATGLM = {
    "padded_vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 3,
    "num_attention_heads": 4,
    "multi_query_group_num": 2,
    "kv_channels": 24,
    "ffn_hidden_size": 80,
    "seq_length": 64,
    "layernorm_epsilon": 0.05,
    "add_qkv_bias": True,
    "rope_ratio": 0.2,
    "rmsnorm": True,
}
EXAONE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "layer_norm_epsilon": 0.05,
    "max_position_embeddings": 64,
    "rope_theta": 1e3,
    "activation_function": "silu",
}

DENSE = {
    "glm": Hostile("glm", {"attention_bias": True, **PARTIAL}),
    "glm4": Hostile("glm4", {"attention_bias": True, **PARTIAL}),
    "chatglm": Hostile(
        "chatglm",
        CHATGLM,
        base={},
        architecture="ChatGLMModel",
        reference=chatglm,
        length_key="seq_length",
    ),
    "smollm3": Hostile(
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "attention_bias": True,
            "mlp_bias": True,
            **SQUARE,
        },
    ),
    "seed_oss": Hostile(
        "seed_oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    ),
    "exaone": Hostile(
        "exaone", EXAONE, base={}, architecture="ExaoneForCausalLM", reference=exaone
    ),
    "exaone4": Hostile("exaone4", {**WINDOWS, **LLAMA3}),
    "exaone4-whole": Hostile(
        "exaone4", {"layer_types": ["full_attention"] * 3}, nulls=("sliding_window",)
    ),
    "olmo": Hostile(
        "olmo",
        {"clip_qkv": 0.9, "attention_bias": True, "rms_norm_eps": None, **SQUARE},
        is_default=True,
    ),
    "olmo3": Hostile(
        "olmo3",
        {
            **SQUARE,
            **WINDOWS,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e2, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "cohere": Hostile(
        "cohere",
        {
            **LAYER,
            "use_qk_norm": True,
            "logit_scale": 0.4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        is_default=True,
    ),
    "cohere2": Hostile(
        "cohere2", {**LAYER, **WINDOWS, "logit_scale": 0.4, "tie_word_embeddings": True}
    ),
    "phi": Hostile("phi", {**LAYER, **PARTIAL, "hidden_act": "gelu_new"}),
    "phi-qk-norm": Hostile("phi", {**LAYER, "qk_layernorm": True}),
    "gpt_neox": Hostile(
        "gpt_neox",
        {**LAYER, "num_key_value_heads": None, **rope("default", partial_rotary_factor=0.25)},
        is_default=True,
    ),
    "gpt_neox-sequential": Hostile(
        "gpt_neox", {**LAYER, "num_key_value_heads": None, "use_parallel_residual": False}
    ),
    "gptj": Hostile("gptj", {**GPT, "rotary_dim": 8}, base={}, length_key="n_positions"),
    "opt": Hostile(
        "opt",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "ffn_dim": 80,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        base={},
        is_default=True,
    ),
    "bloom": Hostile("bloom", BLOOM, base={}, length_key="seq_length", is_default=True),
    "falcon": Hostile("falcon", {**FALCON, "bias": True}, base={}),
    "falcon-new": Hostile(
        "falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, base={}
    ),
    "falcon-one-norm": Hostile(
        "falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
        base={},
    ),
    "falcon-alibi": Hostile(
        "falcon",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        base={},
        attention="sdpa",  # transformers 5.23 adds the biases twice in its eager attention
        is_default=True,
    ),
    "stablelm": Hostile(
        "stablelm", {**LAYER, "use_qkv_bias": True, **rope("default", partial_rotary_factor=0.25)}
    ),
    "stablelm-parallel": Hostile(
        "stablelm",
        {**LAYER, "use_parallel_residual": True, **rope("default", partial_rotary_factor=0.25)},
    ),
    "nemotron": Hostile(
        "nemotron",
        {
            "rms_norm_eps": None,
            "norm_eps": 0.05,
            **PARTIAL,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "relu2",
        },
        is_default=True,
    ),
    "apertus": Hostile("apertus", {**SQUARE, **LLAMA3, "attention_bias": True}, is_default=True),
    "ernie4_5": Hostile("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "hunyuan": Hostile("hunyuan_v1_dense", {"attention_bias": True}),
    "hunyuan-alpha": Hostile("hunyuan_v1_dense", rope("dynamic", factor=1.0, alpha=50.0)),
    "helium": Hostile(
        "helium",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    ),
    "arcee": Hostile("arcee", {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"}),
    "internlm2": Hostile(
        "internlm2",
        {**SQUARE, "bias": True, "rope_theta": 1e3},
        architecture="InternLM2ForCausalLM",
        reference=internlm2,
    ),
    "internlm3": Hostile(
        "internlm3",
        {"qkv_bias": True, "bias": True},
        architecture="InternLM3ForCausalLM",
    ),
    "minicpm": Hostile(
        "minicpm",
        {
            **SQUARE,
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 24,
            "rope_theta": 1e3,
            "tie_word_embeddings": True,
        },
        architecture="MiniCPMForCausalLM",
        reference=minicpm,
    ),
    "mpt": Hostile("mpt", MPT, base={}, length_key="max_seq_len"),
    "ministral": Hostile("ministral", WINDOWS),
    "ministral3": Hostile(
        "ministral3",
        rope("yarn", **YARN, llama_4_scaling_beta=0.7),
        is_default=True,
    ),
    "gpt_bigcode": Hostile(
        "gpt_bigcode", {**GPT, "scale_attn_weights": True}, base={}, length_key="n_positions"
    ),
    "gpt_bigcode-heads": Hostile(
        "gpt_bigcode", {**GPT, "multi_query": False}, base={}, length_key="n_positions"
    ),
    "jais2": Hostile("jais2", {**LAYER, "attention_bias": True, "mlp_bias": True}),
    "cwm": Hostile("cwm", {**WINDOWS, **LLAMA3, "mlp_bias": True}),
    "hyperclovax": Hostile(
        "hyperclovax",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
            "embedding_multiplier": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "vaultgemma": Hostile(
        "vaultgemma",
        {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "sliding_window": 4,
        },
    ),
    "granite_swa": Hostile(
        "granite_swa",
        {
            **WINDOWS,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
            "layer_rope_theta": [1e3, 0.0, 50.0],
        },
    ),
    "iquestcoder": Hostile(
        "iquestcoder",
        {"attention_bias": True, "mlp_bias": True},
        architecture="IQuestCoderForCausalLM",
    ),
    "persimmon": Hostile("persimmon", {**LAYER, **PARTIAL, "num_key_value_heads": None}),
}
